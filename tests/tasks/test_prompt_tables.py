"""Prompts from tables: every format gives the same prompts as JSON lines, or one sentence that says what to correct."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollflow.flows.config import parse_config
from rollflow.flows.locations import attach_run
from rollflow.storage.audit.audit import audit
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.prompt_check import read_files
from tests.support.small_run import prepare_small, train_small

SAVED = Path(__file__).parent.parent / "fixtures/saved_dataset"  # written by `save_to_disk` of datasets 5.2.0
NAMES = {"question": "problem", "answer": "solution"}
ROWS = [{"problem": f"What is {n} + 1?", "solution": str(n + 1), "n": str(n)} for n in range(20)]
Write = Callable[[Path, Sequence[dict[str, Any]]], Path]


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))


def write_jsonl(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    (path := folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(folder: Path, rows: Sequence[dict[str, Any]], suffix: str = "csv", mark: str = ",") -> Path:
    lines = [rows[0], *(row.values() for row in rows)]
    path = folder / f"mine.{suffix}"
    path.write_text("".join(mark.join(map(str, line)) + "\n" for line in lines))
    return path


def write_parquet(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows)), path := folder / "mine.parquet")
    return path


def write_saved(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write the files that `save_to_disk` writes, in two shards."""
    (path := folder / "mine").mkdir()
    table = pa.Table.from_pylist(list(rows))
    for name, part in (("a", table.slice(0, 7)), ("b", table.slice(7))):
        with pa.OSFile(str(path / f"{name}.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": f"{name}.arrow"} for name in "ab"]}))
    return path


FORMATS: dict[str, Write] = {
    "jsonl": write_jsonl,
    "csv": write_csv,
    "tsv": lambda folder, rows: write_csv(folder, rows, "tsv", "\t"),
    "parquet": write_parquet,
    "saved": write_saved,
}


def read(path: Path, reward: dict[str, Any] | None = None, **keys: Any) -> list[dict[str, Any]]:
    """Check a file as `rollflow check` does; return its questions and references."""
    source = {"kind": "file", "path": str(path), **keys}
    config = parse_config({"prompts": [source], "reward": reward or {"kind": "exact"}})
    [rows] = read_files(config, read_file).values()
    return [{"question": row.question, **row.reference} for row in rows]


def refuse(path: Path, reward: dict[str, Any] | None = None, **keys: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read(path, reward, **keys)
    sentence = str(refused.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_every_table_format_gives_the_same_prompt_rows(write: Write, tmp_path: Path) -> None:
    expected = [{"question": r["problem"], "answer": r["solution"], "n": r["n"], "family": None} for r in ROWS]
    assert read(write(tmp_path, ROWS), columns=NAMES) == expected


@pytest.mark.parametrize("write", FORMATS.values(), ids=FORMATS)
def test_run_stores_the_prompt_rows_of_a_table(write: Write, tmp_path: Path) -> None:
    """The run has its own copy whatever the size, and an altered copy is detected."""
    path = write(tmp_path, ROWS)
    source = {"kind": "file", "path": str(path), "columns": NAMES}
    context = prepare_small(tmp_path, versions=1, prompts=[source], keep_prompts_bytes=0)
    before = [context.prompts().prompt(index).text for index in range(40)]
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    opened = attach_run(context.uri)
    assert [opened.prompts().prompt(index).text for index in range(40)] == before
    [kept] = context.store.list("prompts")
    context.store.put(kept, context.store.get(kept).replace(b"7", b"8"))
    with pytest.raises(Corrupt, match="was altered"):
        attach_run(context.uri).prompts()
    assert [(v.kind, v.where) for v in audit(context.store, deep=True).violations] == [("altered", kept)]


def test_run_trains_on_prompts_from_a_table(tmp_path: Path) -> None:
    source = {"kind": "file", "path": str(write_parquet(tmp_path, ROWS)), "columns": NAMES}
    context = prepare_small(tmp_path, versions=2, prompts=[source])
    train_small(context)
    assert audit(context.store, deep=True).clean


def test_saved_data_set_is_read_by_its_splits() -> None:
    assert [len(read(SAVED, columns=NAMES, split=split)) for split in (None, "train", "test")] == [20, 20, 5]
    assert read(SAVED, columns=NAMES)[3] == {"question": "What is 3 + 1?", "answer": "4", "n": 3, "family": None}
    sentence = refuse(SAVED, columns=NAMES, split="valid")
    assert sentence.startswith("prompts.split = 'valid': ")
    assert sentence.endswith("has only the splits train, test; name one of them")


def test_error_names_the_library_for_a_hub_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install 'rollflow[datasets]'" in refuse(Path("openai/gsm8k"), format="hub")


def test_hub_data_set_is_loaded_by_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library reads a folder of files like a data set of the hub."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data", ROWS)
    assert len(read(tmp_path / "data", format="hub", columns=NAMES, split="train[:5]")) == 5
    assert "the data set cannot be loaded (" in refuse(tmp_path / "data", format="hub", split="none")


def test_error_has_the_line_number_in_the_csv_file(tmp_path: Path) -> None:
    """A value may have several lines."""
    (path := tmp_path / "mine.csv").write_text('question,answer\n"a\nb\nc",1\n\nd,2\n" ",3\n')
    assert "line 7: question is empty" in refuse(path)


def test_values_that_json_cannot_store_become_text(tmp_path: Path) -> None:
    row = {"question": "When?", "answer": "x", "day": date(2026, 1, 2), "price": Decimal("1.50"), "ids": [1, None]}
    [found] = read(write_parquet(tmp_path, [row]))
    assert (found["day"], found["price"], found["ids"]) == ("2026-01-02", "1.50", [1, None])
    sentence = refuse(write_parquet(tmp_path, [row | {"image": None}, row | {"image": [b"\x89"]}]))
    assert sentence.endswith("row 2: column 'image' has bytes, which are not text; remove the column from the file")
