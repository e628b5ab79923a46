"""Compares how rollflow moves batches and weights with simple methods that move the same bytes.

    batch commit        TrajectoryStore.commit (join, hash, write, entry)    vs   durable write of the same file
    batch read          TrajectoryStore.read (checked) and open             vs   mmap and open, unchecked
    channel             RayChannel.put (of the committed file) + lease      vs   ray.put + ray.get
    serialisation       records -> Arrow file, Arrow file -> columns        vs   pickle, JSON lines, torch.save
    publish             tensors -> shards, hashed, durable, entry           vs   durable write of one such file
    pull                checked local folder, tensors loaded                vs   durable copy of that file
    distant             a version as deltas through a slow store            vs   the same version whole

The two sides take turns. A ratio is the other side's time divided by rollflow's time, as the median over the turns. So
a ratio of 1 means equally fast, and a ratio above 1 means that rollflow is faster. Both sides write to the same disk
(`--folder`, default: a temporary folder), and both writes survive a power cut: a durable write syncs its file, renames
it and syncs its folder. Files that are read are in the page cache on both sides. The two sides swap their order after
each turn, and the first turn is a warm-up. Before the turns, enough memory for all turns is touched. On a virtual
machine, never-used memory makes a write five times as slow, on either side by chance.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import pickle
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Row, arguments, at_least, publish
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.log.entries import Entry, RunCreated, VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import FinishedGroup, GroupKey, StopReason, StoredObject, Trajectory, TrajectoryGroup
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.learners.checkpoint.shards import from_files, to_files

GROUP_SIZE, TOKENS = 8, 200
TRAJECTORIES = (128, 512, 2048, 8192)
PAYLOADS = (64 << 10, 1 << 20, 8 << 20, 64 << 20)
WEIGHTS = ((600_000, torch.float32), (10_000_000, torch.float32), (100_000_000, torch.float32), (10**9, torch.bfloat16))
HUGE_PAGE, MOST_TOUCHED = 2 << 20, 4 << 30
QUICK = {"trajectories": (16, 32, 64, 128), "payloads": (1 << 10, 64 << 10, 256 << 10, 1 << 20)}
QUICK_WEIGHTS = tuple((count, torch.float32) for count in (1_000, 10_000, 100_000, 600_000))

Work = Callable[[], object]


def ratio(ours: Work, theirs: Work, turns: int, size: int = 0) -> tuple[float, float, float]:
    """Return medians over the turns: theirs / ours, our seconds, and their seconds. A turn writes `size` bytes."""
    touch_memory((2 * turns + 8) * size)
    times = []
    for turn in range(turns + 1):
        if turn % 2:
            times.append((seconds(ours), seconds(theirs)))
        else:
            second = seconds(theirs)
            times.append((seconds(ours), second))
    return medians(times[1:])


def touch_memory(size: int) -> None:
    """Allocate and free `size` bytes, so that the host of a virtual machine has this memory ready."""
    whole = min(size, MOST_TOUCHED) // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE
    with mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, whole, mmap.PAGESIZE):
            memory[start] = 1


def medians(times: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the medians over the turns of the ratio, of rollflow's seconds, and of the other side's seconds."""
    return (
        statistics.median(b / a for a, b in times),
        statistics.median(a for a, _ in times),
        statistics.median(b for _, b in times),
    )


def seconds(work: Work) -> float:
    """Return the duration of `work` in seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def rows_of(case: str, found: tuple[float, float, float], what: str, target: float | None) -> list[Row]:
    """Return rows with the ratio, and the milliseconds of both sides."""
    value, ours, theirs = found
    first = (
        Row(case, f"ratio to {what}", value) if target is None else at_least(case, f"ratio to {what}", value, target)
    )
    return [first, Row(case, "rollflow, ms", ours * 1e3), Row(case, f"{what}, ms", theirs * 1e3)]


def write_synced(file: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file durably with the fewest steps: write, sync and rename the file, and sync its folder."""
    with open(file.with_suffix(".new"), "wb", buffering=0) as out:
        for part in parts:
            out.write(part)
        os.fsync(out.fileno())
    named(file)


def named(file: Path) -> None:
    """Rename a written file durably."""
    os.replace(file.with_suffix(".new"), file)
    folder = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(folder)
    os.close(folder)


# --- trajectories -------------------------------------------------------------------------------------------


def groups(count: int) -> tuple[TrajectoryGroup, ...]:
    """Build groups with `count` trajectories of `TOKENS` tokens in total."""
    draw = random.Random(0)

    def trajectory(sample: int) -> Trajectory:
        prompt = TOKENS // 8
        tokens = tuple(draw.randrange(150_000) for _ in range(TOKENS))
        logprobs = (0.0,) * prompt + tuple(-draw.random() for _ in range(TOKENS - prompt))
        mask, versions = (False,) * prompt + (True,) * (TOKENS - prompt), (-1,) * prompt + (0,) * (TOKENS - prompt)
        return Trajectory(sample, 0, tokens, mask, logprobs, versions, draw.random(), "made up", StopReason.STOP)

    return tuple(
        TrajectoryGroup(GroupKey(n, 0), f"prompt-{n}", "made-up", tuple(map(trajectory, range(GROUP_SIZE))))
        for n in range(count // GROUP_SIZE)
    )


def new_run(store: LocalStore, weights: Mapping[str, Data] | None = None) -> tuple[Log, Writer, Writer]:
    """Create a run with version 0, its scheduler and its learner."""
    log, kept = Log(store), {"keep_last": 1, "keep_every": 10**6, "state_every": 10**6}
    log.create(RunCreated("plane", {"async_ratio": 10**6, "group_size": GROUP_SIZE, "store": kept}, "", 1))
    log.claim("supervisor")
    scheduler, learner, policies = log.claim("scheduler"), log.claim("learner"), PolicyStore(log)
    trained = policies.stage(learner, 0, weights or {"weights/x": b""})
    policies.publish(learner, VersionPublished(0, None, trained, policies.stage(learner, 0, {"state/x": b""})))
    return log, scheduler, learner


def commit_next(store: TrajectoryStore, writer: Writer, made: Sequence[FinishedGroup]) -> Entry:
    """Commit the groups as the next batch, for the next prompts."""
    state = store.log.state
    prompts = tuple(range(state.issued[0], state.issued[0] + len(made)))
    renamed = tuple(replace(group, key=GroupKey(p, 0)) for group, p in zip(made, prompts, strict=True))
    return store.commit(writer, StagedBatch(state.next_batch, renamed, prompts))[0]


def batches(sizes: Iterable[int], turns: int, folder: Path) -> list[Row]:
    """Measure commit and read of whole batches."""
    rows = []
    for size in sizes:
        made = tuple(pack_group(group) for group in groups(size))  # groups as the scheduler holds them after scoring
        data = TrajectoryBatch.from_groups(made).to_bytes()
        case = f"{size} trajectories, {data.size / 1e6:.1f} MB"
        log, writer, _ = new_run(LocalStore(folder / uuid.uuid4().hex))
        store = TrajectoryStore(log)
        write_synced(folder / "plain", [memoryview(data)])
        fresh = (folder / f"plain-{size}-{turn}" for turn in range(2 * (turns + 1)))  # new files, as in a commit
        plain = partial(lambda fresh, data: write_synced(next(fresh), [memoryview(data)]), fresh, data)
        found = ratio(partial(commit_next, store, writer, made), plain, turns, data.size)
        rows += rows_of(f"commit, {case}", found, "durable write", 0.7)
        file = log.state.waiting[0].file

        def checked(store: TrajectoryStore = store, file: StoredObject = file) -> None:
            touch(TrajectoryBatch.from_bytes(store.read(file)))

        found = ratio(checked, lambda: touch(TrajectoryBatch.from_bytes(mapped(folder / "plain"))), turns)
        rows += rows_of(f"read, {case}", found, "mmap, unchecked", None)
    return rows


def mapped(file: Path) -> mmap.mmap:
    """Memory-map a file."""
    with open(file, "rb") as opened:
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)


def touch(batch: TrajectoryBatch) -> None:
    """Read every token."""
    import pyarrow.compute as pc

    pc.sum(pc.list_flatten(batch.table["tokens"]))


def serialisation(sizes: Iterable[int], turns: int) -> list[Row]:
    """Measure the conversion of records to bytes, and of bytes to columns or records."""
    rows = []
    for size in sizes:
        made = groups(size)
        plain = [[asdict(t) for t in g.trajectories] for g in made]
        ours = TrajectoryBatch.from_groups(made).to_bytes()
        formats: dict[str, tuple[Callable[[], bytes], Callable[[bytes], object]]] = {
            "pickle": (lambda made=made: pickle.dumps(made, protocol=5), pickle.loads),  # type: ignore[misc]
            "JSON lines": (
                lambda plain=plain: "\n".join(map(json.dumps, plain)).encode(),  # type: ignore[misc]
                lambda data: [json.loads(line) for line in data.splitlines()],
            ),
            "torch.save": (lambda plain=plain: torch_saved(plain), torch_loaded),  # type: ignore[misc]
        }
        for name, (dump, load) in formats.items():
            data = dump()
            write = ratio(lambda made=made: TrajectoryBatch.from_groups(made).to_bytes(), dump, turns)  # type: ignore[misc]
            read = ratio(
                lambda ours=ours: touch(TrajectoryBatch.from_bytes(ours)),  # type: ignore[misc]
                lambda load=load, data=data: load(data),  # type: ignore[misc]
                turns,
            )
            rows.append(at_least(f"serialise {size} trajectories", f"write, {name} / ours", write[0], 1.0))
            rows.append(at_least(f"serialise {size} trajectories", f"read, {name} / ours", read[0], 1.0))
    return rows


def torch_saved(plain: list[list[dict[str, object]]]) -> bytes:
    """Save records with tensors instead of lists, as a training script would."""
    import io

    columns = ("tokens", "loss_mask", "logprobs", "versions")
    rows = [{**t, "ending": str(t["ending"]), **{c: torch.tensor(t[c]) for c in columns}} for g in plain for t in g]
    out = io.BytesIO()
    torch.save(rows, out)
    return out.getvalue()


def torch_loaded(data: bytes) -> object:
    import io

    return torch.load(io.BytesIO(data), weights_only=True)


# --- the channel --------------------------------------------------------------------------------------------


def channel(sizes: Iterable[int], turns: int, folder: Path) -> list[Row]:
    """Compare passing a batch through the channel's actor with a plain put and get in Ray's object store."""
    import pyarrow as pa
    import ray

    from rollflow.tasks.actors.channel import start_channel

    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace=uuid.uuid4().hex)
    loop = asyncio.Runner()  # one event loop for all calls, because creating an event loop takes a millisecond
    try:
        run = LocalStore(folder / uuid.uuid4().hex)
        log, writer, _ = new_run(run)
        through, rows = start_channel(run, 4, 0), list[Row]()
        done: list[int] = []
        for size in sizes:
            payload = pa.py_buffer(os.urandom(size))
            file = folder / f"payload-{size}"
            file.write_bytes(payload)
            small = groups(GROUP_SIZE)  # a small committed batch; the measured payload takes its place in the channel
            committed = iter([commit_next(TrajectoryStore(log), writer, small) for _ in range(turns + 1)])

            def ours(file: Path = file, committed: Iterator[Entry] = committed) -> None:
                entry = next(committed)
                turn = entry.batch - 1
                loop.run(through.put(turn, file, 10.0, entry.n))
                done.append(turn)
                touch_pages(through.lease(turn, 10.0))

            def theirs(payload: pa.Buffer = payload) -> None:
                touch_pages(ray.get(ray.put(payload)))

            ours()  # the first call connects
            through.finish(done[-1], done[-1] + 1)
            times = []
            for _ in range(turns):
                times.append((seconds(ours), seconds(theirs)))
                through.finish(done[-1], done[-1] + 1)
            rows += rows_of(f"channel, {size / 1e6:.2f} MB", medians(times), "ray.put + ray.get", 0.8)
        return rows
    finally:
        loop.close()
        ray.shutdown()


def touch_pages(data: object) -> None:
    """Read one byte of every page, because memory-mapping alone reads nothing."""
    np.frombuffer(data, np.uint8)[:: mmap.PAGESIZE].sum()  # type: ignore[call-overload]


# --- weights ------------------------------------------------------------------------------------------------


def weights(sizes: Iterable[tuple[int, torch.dtype]], turns: int, folder: Path) -> list[Row]:
    """Measure publish and pull of whole policies with random tensors."""
    rows = []
    for count, dtype in sizes:
        tensors = policy(count, dtype)
        total = sum(t.nbytes for t in tensors.values())
        case = f"{count / 1e6:g}M parameters, {total / 1e6:,.0f} MB"
        run = LocalStore(folder / uuid.uuid4().hex)

        log, scheduler, learner = new_run(run, to_files("weights/model", tensors))
        store, small = PolicyStore(log), groups(GROUP_SIZE)
        made = iter([commit_next(TrajectoryStore(log), scheduler, small).n for _ in range(turns + 1)])

        def published(
            store: PolicyStore = store,
            learner: Writer = learner,
            made: Iterator[int] = made,
            tensors: dict[str, torch.Tensor] = tensors,
        ) -> None:
            version = store.log.state.version + 1
            staged = store.stage(learner, version, to_files("weights/model", tensors))
            store.publish(learner, VersionPublished(version, next(made), staged))
            store.prune(learner)

        views = [t.reshape(-1).view(torch.uint8).numpy().data for t in tensors.values()]
        plain = folder / f"plain-{count}"
        rows += rows_of(
            f"publish, {case}",
            ratio(published, lambda views=views, plain=plain: write_synced(plain, views), turns, total),  # type: ignore[misc]
            "durable write",
            0.7,
        )

        def pulled(run: LocalStore = run) -> None:
            store = PolicyStore(Log(run))
            # a new cache folder stands for a new node, which has not checked any file yet
            store.weights_folder(found := store.find(0), folder / uuid.uuid4().hex)
            from_files({o.path: mapped_copy(run.local_path(o.path)) for o in found.weights})

        found = ratio(pulled, lambda plain=plain: copied(plain, folder / "copy"), turns)  # type: ignore[misc]
        rows += rows_of(f"pull, {case}", found, "durable copy", 0.7)
        shutil.rmtree(run.root)
    return rows


def policy(count: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Create `count` parameters in 50 tensors."""
    whole = torch.empty(count, dtype=dtype).uniform_(-1, 1)
    return {f"layers.{n}.weight": part for n, part in enumerate(whole.tensor_split(50))}


def mapped_copy(file: Path) -> memoryview:
    from rollflow.storage.objects.disk import map_file

    return map_file(file)


def copied(source: Path, target: Path) -> None:
    """Copy a file and sync the copy."""
    shutil.copyfile(source, target.with_suffix(".new"))
    with open(target.with_suffix(".new"), "rb") as file:
        os.fsync(file.fileno())
    named(target)


def distant(count: int, folder: Path) -> list[Row]:
    """Measure publish and fetch of a version, whole and as deltas, through a store with 30 ms delay and 1 Gbit/s."""
    from benchmarks.delta_weights import measure_drawn

    return list(measure_drawn(folder, count))


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="small sizes and one turn, only to test the benchmark")
    parser.add_argument("--turns", type=int, default=5, help="number of turns over which the median is taken")
    parser.add_argument("--folder", type=Path, help="folder to write to; default: a temporary folder")
    parser.add_argument("--only", choices=["batches", "serialisation", "channel", "weights", "distant"])
    options = parser.parse_args()
    turns = 1 if options.quick else options.turns
    many, payloads = (QUICK["trajectories"], QUICK["payloads"]) if options.quick else (TRAJECTORIES, PAYLOADS)
    sizes = QUICK_WEIGHTS if options.quick else WEIGHTS
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        sections: dict[str, Callable[[], list[Row]]] = {
            "batches": lambda: batches(many, turns, folder),
            "serialisation": lambda: serialisation(many, turns),
            "channel": lambda: channel(payloads, turns, folder),
            "weights": lambda: weights(sizes, turns, folder),
            "distant": lambda: distant(10**5 if options.quick else 10**8, folder),
        }
        rows = [row for key, section in sections.items() if options.only in (None, key) for row in section()]
    publish(rows, "data plane: ratios to the plain way, more is better", options.json)


if __name__ == "__main__":
    main()
