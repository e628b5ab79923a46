"""Measures how the cost of a run's operations grows with its log, on logs of 100 to 100,000 versions.

    python -m benchmarks.ledger_growth [--largest N] [--json FILE]

The shipped code creates a run's log, with batches, versions and prunings in turn, and with tiny objects. Then the
shipped classes execute each operation (step) on this log: in a local folder, and in a simulated store that answers each
request after 30 ms. The simulated store has its objects in memory, and lists names in pages of 1,000. The table has the
median seconds of a step, its requests, and the ratio of its time on the longest log to that on a log of 1,000 versions.

A deep audit and a search for garbage read all objects. They are measured per version, on smaller runs with all objects.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import tempfile
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from benchmarks.report import Row, arguments, at_most, publish
from rollflow.flows.tracking.status_writer import StatusWriter
from rollflow.flows.tracking.tracking import Tracker
from rollflow.flows.views.status import StageStatus
from rollflow.storage.audit import checkpoints
from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.checkpoints import AuditCheckpoint
from rollflow.storage.audit.garbage import list_orphans
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import Conflict, Missing
from rollflow.storage.log.entries import (
    BatchCommitted,
    Body,
    Claimed,
    Entry,
    Pruned,
    Role,
    RunCreated,
    TrainedGroup,
    VersionPublished,
    WrittenEntry,
    encode,
    entry_path,
)
from rollflow.storage.log.rules import apply, decide
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.snapshots import EVERY, segment_path, snapshot_path, to_bytes
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import Data, ObjectStat, ObjectStore, split_buffers
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import GroupKey, StopReason, StoredObject, Trajectory, TrajectoryGroup
from rollflow.storage.run_records.usage import CpuUsage
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.actors.lease import STATUS
from rollflow.tasks.actors.statuses import LearnerStatus, RewardStatus, RolloutStatus
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import FORMAT, RunContext

SIZES = (100, 1_000, 10_000, 100_000)
LATENCY_SECONDS = 0.03
PAGE = 1_000  # the number of names in one answer to a listing
GROUPS, SIZE = 32, 8
TURNS = 7
TOLD = {  # metrics of a version that a run's status needs
    "reward": 0.5,
    "response_tokens": 600.0,
    "discarded_tokens": 0.0,
    "surplus_tokens": 0.0,
    "wait_seconds": 0.0,
    "staleness_mean": 0.0,
}
TIMES = 1.5  # target of the ratio of a step's time on the longest log to its time on a log of 1,000 versions
WHOLE = (300, 3_000)  # numbers of versions in the runs of which all objects are read


class Counting(ObjectStore):
    """A base class of stores that count their requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()


class Distant(Counting):
    """A store in memory whose requests take a fixed time."""

    def __init__(self, seconds: float = LATENCY_SECONDS) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.names: list[str] = []
        self.seconds = seconds

    def fill(self, objects: dict[str, bytes]) -> None:
        """Add objects to the store without the delay of a request."""
        self.objects |= objects
        self.names = sorted(self.objects)

    @property
    def uri(self) -> str:
        return f"distant://{id(self)}"

    def child(self, prefix: str) -> ObjectStore:
        raise NotImplementedError

    def put(self, path: str, data: Data) -> str:
        self._ask("PUT")
        return self._write(path, data)

    def create(self, path: str, data: Data) -> None:
        self._ask("PUT")
        if path in self.objects:
            raise Conflict(f"{path} exists")
        self._write(path, data)

    def get(self, path: str) -> bytes:
        self._ask("GET")
        if path not in self.objects:
            raise Missing(f"there is no object {path}")
        return self.objects[path]

    def fetch(self, path: str, file: Path) -> str:
        raise NotImplementedError

    def stat(self, path: str) -> ObjectStat:
        return ObjectStat(len(self.get(path)), 0.0)

    def exists(self, path: str) -> bool:
        self._ask("HEAD")
        return path in self.objects

    def list(self, prefix: str = "", after: str = "") -> Iterator[str]:
        first = bisect_right(self.names, max(f"{prefix}/", after))
        found = []
        for name in self.names[first:]:
            if not name.startswith(f"{prefix}/"):
                break
            found.append(name)
        for _ in range(1 + len(found) // PAGE):
            self._ask("LIST")
        return iter(found)

    def delete(self, path: str) -> None:
        self._ask("DELETE")
        if self.objects.pop(path, None) is not None:
            self.names.remove(path)

    def check(self) -> None:
        pass

    def _write(self, path: str, data: Data) -> str:
        body = b"".join(split_buffers(data))
        if path not in self.objects:
            self.names.insert(bisect_right(self.names, path), path)
        self.objects[path] = body
        return hashlib.sha256(body).hexdigest()

    def _ask(self, method: str) -> None:
        self.requests[method] += 1
        time.sleep(self.seconds)


@dataclass
class Made:
    """The objects of a log, its state, and the entries by which processes took its roles (claims)."""

    objects: dict[str, bytes]
    state: RunState
    claims: dict[Role, int]


def make(versions: int) -> Made:
    """Create a log with `versions` versions."""
    made, state, claims = {}, RunState(), dict[Role, int]()

    def add(role: Role, body: Body) -> None:
        nonlocal state
        n = state.n + 1
        claim = n if isinstance(body, Claimed) else claims.get(role, 0)
        if isinstance(body, Claimed):
            claims[role] = n
        after = decide(state, n, role, claim, body)
        head = (after.version, after.next_batch)
        entry = Entry(n, state.sha256, uuid.uuid4().hex, role, claim, *head, float(n), body)
        encoded = encode(entry)
        made[entry_path(n)] = encoded.data
        state = apply(state, WrittenEntry(entry, encoded.sha256))
        if n % EVERY == EVERY - 1:
            made[segment_path(n)] = b"\n".join(made[entry_path(m)] for m in range(n + 1 - EVERY, n + 1))

    snapshot = (-1, "")
    add("creator", created())
    add("supervisor", Claimed())
    for role in ("scheduler", "learner"):
        add(role, Claimed(under=1))
    add("learner", version_of(0, None))
    for version in range(1, versions + 1):
        add("scheduler", batch_of(state))
        add("learner", version_of(version, state.n))
        if state.releasable:
            add("learner", Pruned(tuple(state.releasable)))
        if state.n // EVERY > snapshot[0] // EVERY:
            snapshot = (state.n, state.sha256)
            kept = snapshot_path(*snapshot), to_bytes(state)
    made[kept[0]] = kept[1]
    return Made(made, state, claims)


def created() -> RunCreated:
    """Return entry 0, with a complete config."""
    config = RunConfig(async_ratio=1, groups=GROUPS, group_size=SIZE).model_dump(mode="json")
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return RunCreated("long", config, sha256, 1, format=FORMAT)


def groups_of(state: RunState, groups: int = GROUPS, size: int = SIZE) -> tuple[TrajectoryGroup, ...]:
    """Build groups for the next prompts, with one token per response, all of the newest version."""
    version, first = state.version, state.issued[0]
    mask, logprobs, versions = (False, True), (0.0, -0.5), (-1, version)
    made = [Trajectory(s, version, (1, 2), mask, logprobs, versions, 1.0, "", StopReason.STOP) for s in range(size)]
    return tuple(TrajectoryGroup(GroupKey(p, 0), "", "", tuple(made)) for p in range(first, first + groups))


def batch_of(state: RunState) -> BatchCommitted:
    """Build the entry of the next batch, whose groups were started one version before the newest one."""
    number, first = state.next_batch, state.issued[0]
    started = max(state.version - 1, 0)
    groups = tuple(TrainedGroup(prompt, 0, started, state.version, 600) for prompt in range(first, first + GROUPS))
    stored = StoredObject(f"trajectories/{number:08d}-2-x.arrow", 100, "0" * 64)
    return BatchCommitted(number, stored, GROUPS * SIZE, groups, tuple(range(first, first + GROUPS)))


def version_of(number: int, batch: int | None) -> VersionPublished:
    """Build a version with tiny objects."""
    weights = StoredObject(f"policies/{number:08d}/3/weights/model.safetensors", 100, "0" * 64)
    state = StoredObject(f"policies/{number:08d}/3/state/state.safetensors", 100, "1" * 64)
    metrics = {f"metric_{one}": 0.25 for one in range(30)} | TOLD
    return VersionPublished(number, batch, (weights,), (state,), (-1.5,) * 32, metrics, "0.1.0")


class Silent:
    """A tracker that does nothing, because MLflow is not measured."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given: None


class Seen:
    """Stages that do nothing."""

    usage, rollout, reward, learner = CpuUsage(), RolloutStatus(), RewardStatus(), LearnerStatus()

    def statuses(self) -> dict[str, StageStatus]:
        return {}


class Steps:
    """The measured operations (steps) on a run."""

    def __init__(self, run: ObjectStore, made: Made, cache: Path) -> None:
        self.run, self.made, self.cache = run, made, cache
        self.log = Log(run)
        self.batches, self.policies = TrajectoryStore(self.log), PolicyStore(self.log)
        self.scheduler = Writer(self.log, "scheduler", made.claims["scheduler"])
        self.learner = Writer(self.log, "learner", made.claims["learner"])
        self.follower = Log(run)
        report = AuditReport()
        report.close(made.state)
        first = hashlib.sha256(run.get(entry_path(0))).hexdigest()
        checkpoints.keep(run, AuditCheckpoint(made.state, report, {}, SIZE, first))
        self.restart()

    def start(self) -> None:
        """Open the log as any process does: the newest snapshot and the entries after it."""
        Log(self.run)

    def begin(self) -> None:
        """Start a scheduler: open the log, take the role, and find the work to continue."""
        log = Log(self.run)
        self.scheduler = log.claim("scheduler")
        ResumePoint.of_state(log.state)
        self.batches = TrajectoryStore(log)

    def commit(self) -> None:
        """Commit a batch's file and its entry."""
        state = self.batches.log.state
        groups = groups_of(state)
        staged = StagedBatch(state.next_batch, groups, tuple(group.key.prompt for group in groups))
        self.batches.commit(self.scheduler, staged)

    def publish(self) -> None:
        """Publish a version: two objects and an entry."""
        publish_next(self.policies, self.learner)

    def follow(self) -> None:
        """Read the entries that scheduler and learner have appended."""
        self.follower.follow()

    def old_version(self) -> None:
        """Find an old version by bisection."""
        self.policies.find(self.made.state.version // 3)

    def restart(self) -> None:
        """Restart a supervisor: take the role, and load everything that its status shows."""
        context = RunContext(self.run.uri, self.cache)
        context.__dict__["store"] = self.run
        context.log.claim("supervisor")
        self.writer = StatusWriter(context, Seen(), cast(Tracker, Silent()))
        self.writer.refresh()

    def tick(self) -> None:
        """Do what a supervisor does every second: read new log entries, and write `status.json`."""
        self.writer.context.log.follow()
        self.writer.refresh()

    def audit(self) -> None:
        """Audit the part of the log after the last clean audit."""
        report = audit(self.run)
        assert report.clean, report.violations


def publish_next(policies: PolicyStore, learner: Writer) -> None:
    """Publish the next version, with tiny objects, from the waiting batch."""
    policies.log.follow()
    state = policies.log.state
    version, metrics = state.version + 1, {f"metric_{one}": 0.25 for one in range(30)} | TOLD
    batch = state.waiting[version - 1].entry if version else None
    parts = ({"weights/model.safetensors": b"w" * 100}, {"state/state.safetensors": b"s" * 100})
    weights, states = (policies.stage(learner, version, files) for files in parts)
    made = VersionPublished(version, batch, weights, states, (-1.5,) * 32, metrics, "0.1.0")
    policies.publish(learner, made)


def measured(steps: Steps, requests: Counter[str] | None) -> dict[str, tuple[float, str]]:
    """Return for each step its median seconds, and the requests of the last turn."""
    work: dict[str, Callable[[], None]] = {
        "start": steps.start,
        "scheduler's begin": steps.begin,
        "commit": steps.commit,
        "publish": steps.publish,
        "follow": steps.follow,
        "supervisor's tick": steps.tick,
        "supervisor's restart": steps.restart,
        "audit of what is new": steps.audit,
        "find an old version": steps.old_version,
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    asked: dict[str, str] = {}
    for _ in range(TURNS):
        for name, step in work.items():
            steps.log.settle()
            before = Counter(requests)
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
            counted = Counter(requests) - before
            asked[name] = ", ".join(f"{count} {method}" for method, count in sorted(counted.items()))
    return {name: (statistics.median(found), asked[name]) for name, found in seconds.items()}


def written(made: Made, folder: Path) -> LocalStore:
    """Write the log to a folder, without waiting for the disk."""
    for path, data in made.objects.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return LocalStore(folder)


def rows(largest: int) -> Iterator[Row]:
    """Return all rows."""
    local: dict[int, dict[str, tuple[float, str]]] = {}
    distant: dict[int, dict[str, tuple[float, str]]] = {}
    sizes = [size for size in SIZES if size <= largest]
    for size in sizes:
        began = time.process_time()
        made = make(size)
        entries = made.state.n + 1
        print(f"{size} versions, {entries} entries", file=sys.stderr)
        yield Row(f"{size} versions", "entries", entries)
        yield Row(f"{size} versions", "made and folded, entries/s of a core", entries / (time.process_time() - began))
        yield Row(f"{size} versions", "snapshot, bytes", len(to_bytes(made.state)))
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "cache"
            steps = Steps(written(made, Path(folder) / "run"), made, cache)
            local[size] = measured(steps, None)
            yield Row(f"{size} versions", "status.json, bytes", len(steps.run.get(STATUS)))
            far = Distant()
            far.fill(made.objects)
            distant[size] = measured(Steps(far, made, cache), far.requests)
    for where, found in (("folder", local), ("30 ms a request", distant)):
        for name in found[sizes[0]]:
            for size in sizes:
                seconds, asked = found[size][name]
                yield Row(f"{name}, {where}, {size} versions", asked or "ms", 1e3 * seconds)
            if 1_000 in sizes:
                ratio = found[sizes[-1]][name][0] / found[1_000][name][0]
                yield at_most(f"{name}, {where}", f"{sizes[-1]} versions, times those of 1,000", ratio, TIMES)


def whole(run: ObjectStore, versions: int) -> None:
    """Create a run with all its objects: 2 groups of 2 trajectories per batch."""
    log = Log(run)
    few = created()
    config = {**few.config, "groups": 2, "group_size": 2}
    sha256 = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    log.create(replace(few, config=config, config_sha256=sha256))
    log.claim("supervisor")
    scheduler, learner = log.claim("scheduler"), log.claim("learner")
    batches, policies = TrajectoryStore(log), PolicyStore(log)
    publish_next(policies, learner)
    for _ in range(versions):
        groups = groups_of(log.state, 2, 2)
        batches.commit(scheduler, StagedBatch(log.state.next_batch, groups, tuple(g.key.prompt for g in groups)))
        publish_next(policies, learner)
        policies.prune(learner)
    log.settle()


def reading() -> Iterator[Row]:
    """Measure the time of a deep audit, and of a search for garbage, per version."""
    for where in ("folder", "30 ms a request"):
        took: dict[str, list[float]] = {}
        for versions in WHOLE:
            with tempfile.TemporaryDirectory() as folder:
                far = Distant(0.0)
                run = LocalStore(Path(folder)) if where == "folder" else far
                print(f"{versions} versions to read, {where}", file=sys.stderr)
                whole(run, versions)
                far.seconds = LATENCY_SECONDS
                work: dict[str, Callable[[], int]] = {
                    "deep audit": lambda run=run: audit(run, deep=True).bytes,  # type: ignore[misc]
                    "search for garbage": lambda run=run: len(list_orphans(run, 1e12)),  # type: ignore[misc]
                }
                for name, step in work.items():
                    began = time.perf_counter()
                    size = step()
                    seconds = time.perf_counter() - began
                    case = f"{name}, {where}, {versions} versions"
                    took.setdefault(name, []).append(seconds / versions)
                    yield Row(case, "ms a version", 1e3 * seconds / versions)
                    if name == "deep audit":
                        yield Row(case, "MB/s of tiny objects", size / 1e6 / seconds)
        for name, (few, many) in took.items():
            yield at_most(f"{name}, {where}", f"a version of {WHOLE[-1]}, times one of {WHOLE[0]}", many / few, TIMES)


def main() -> None:
    """Measure all operations, and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="versions of the longest log")
    options = parser.parse_args()
    publish([*rows(options.largest), *reading()], "the log of a long run", options.json)


if __name__ == "__main__":
    main()
