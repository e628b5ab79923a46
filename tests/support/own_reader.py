"""Checks a run's folder with json, hashlib and pyarrow alone: the chain, alpha, exactly once, and lineage."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa


def violations(run: Path) -> list[str]:
    """List what is wrong with the run in this folder: in its log (with the entry's number) and in its batch files."""
    found, trained, newest, before, config = list[str](), set[int](), -1, "", dict[str, Any]()
    fates: dict[tuple[int, int], str] = {}  # (prompt, attempt) -> fate
    batches: dict[int, Any] = {-1: (None, {"groups": []})}  # batch number -> its entry and body, until it is voided

    def fate(prompt: int, attempt: int, now: str, then: str | None = "open") -> None:
        was, fates[prompt, attempt] = fates.get((prompt, attempt)), now
        found.extend([f"{n}: ({prompt}, {attempt}) is {now}, and was {was}"] * (was != then))
        if now in ("stale", "failed", "redundant", "corrupt"):
            fate(prompt, attempt + 1, "open", None)

    for n, path in enumerate(sorted((run / "log").iterdir())):
        entry, data = json.loads(path.read_bytes()), path.read_bytes()
        sealed, body, number = entry.pop("seal"), entry["body"], entry["body"].get("number")
        plain, follows = json.dumps(entry, separators=(",", ":")).encode(), (f"{n:010d}.json", n, before)
        found += [f"{n}: it was altered"] * (sealed != sha256(plain).hexdigest())
        found += [f"{n}: it does not follow"] * ((path.name, entry["n"], entry["prev"]) != follows)
        before, config = sha256(data).hexdigest(), config or body["config"]
        if index := entry.get("index"):
            body |= json.loads(lists := (run / index["path"]).read_bytes())
            found += [f"{n}: its index was altered"] * (sha256(lists).hexdigest() != index["sha256"])
        if body["kind"] == "batch-committed":
            issued = [(prompt, 0, "open", None) for prompt in body["issued"]]
            for one in issued + [(*key, reason) for key, reason, *_ in body["discards"]]:
                fate(*one)
            for prompt, attempt, started, *_ in body["groups"]:
                fate(prompt, attempt, "in a batch")
                found += [f"{n}: ({prompt}, {attempt}) is stale"] * (started < number - config["async_ratio"])
            batches[number] = n, body
        elif body["kind"] == "batch-voided":
            for prompt, attempt, *_ in batches.pop(number, batches[-1])[1]["groups"]:
                fate(prompt, attempt, "corrupt", "in a batch")
        elif body["kind"] == "version-published":
            batch = batches.get(number - 1, ("nothing", {"groups": []}))
            found += [f"{n}: not of the batch before"] * ((number, body["batch_entry"]) != (newest + 1, batch[0]))
            found += [f"{n}: prompt {p} is trained on again" for p, *_ in batch[1]["groups"] if p in trained]
            newest, trained = number, trained | {prompt for prompt, *_ in batch[1]["groups"]}
    return found + [f"batch {k}: {why}" for k in batches if k >= 0 for why in rows(run, batches[k][1], config)]


def rows(run: Path, body: Any, config: Any) -> list[str]:
    """List what is wrong with a batch's file; if it is not an Arrow file, only its hash is checked."""
    if sha256(data := (run / body["file"]["path"]).read_bytes()).hexdigest() != body["file"]["sha256"]:
        return ["it is not the file that was committed"]
    read = pa.ipc.open_file(data).read_all().to_pylist() if data.startswith(b"ARROW1") else None
    told = [(prompt, attempt) for prompt, attempt, *_ in body["groups"] for _ in range(config["group_size"])]
    stale = any(row["started_version"] < body["number"] - config["async_ratio"] for row in read or [])
    other = read is not None and [(row["index"], row["attempt"]) for row in read] != told
    return ["a row is stale"] * stale + ["its rows are not those of its groups"] * other
