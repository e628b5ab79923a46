"""Tests SIGKILL before and after every store write of a run: the run continues, and nothing is lost or duplicated.

A child process executes the whole control path (scheduler and learner without models) on a folder, and kills itself at
its n-th write. The parent increases n until a run ends without a kill. Each killed run is killed once more during its
recovery. Kills between two writes are tested, too: the scheduler and the learner are killed at random times.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Literal

import pytest

from rollflow.storage.audit.audit import audit
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.tasks.runtime.clock import run_virtual
from tests.support import log_actors
from tests.support.counts import ALL
from tests.support.forked import alone
from tests.support.log_actors import Learner, Scheduler, Supervisor, chained, create_run, entries
from tests.support.pipeline import Damage, Pipeline
from tests.support.waiting import HANG_SECONDS

pytestmark = pytest.mark.slow

VERSIONS, GROUPS = 4, 2
KILLS = 60 if ALL else 20
FORK = multiprocessing.get_context("fork")  # a new interpreter for each of some hundred kills would take minutes


DAMAGES: Mapping[str, Mapping[tuple[int, int], Damage]] = {
    "sound": {},
    "cut": {(1, 0): "cut"},
    "gone": {(2, 0): "gone"},
    "not finite": {(1, 0): "not finite", (2, 0): "not finite"},
}


@dataclass(frozen=True)
class KillingStore(LocalStore):
    """A local store whose process dies at the `at`-th write, before or after it; some writes are concurrent."""

    at: int = 0
    after: bool = False
    numbers: Iterator[int] = field(default_factory=lambda: count(1), compare=False)

    def put(self, path: str, data: Data) -> str:
        with self._write():
            return super().put(path, data)

    def create(self, path: str, data: Data) -> None:
        with self._write():
            super().create(path, data)

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        """Count both writes. Between them, a kill finds the file, but not the object that names the file."""
        with ExitStack() as writes:
            writes.enter_context(self._write())

            def between(sha256: str) -> Data:
                writes.close()
                writes.enter_context(self._write())
                return content(sha256)

            return super().create_naming(path, between, file, data)

    def delete(self, path: str) -> None:
        with self._write():
            super().delete(path)

    @contextmanager
    def _write(self) -> Iterator[None]:
        met = next(self.numbers) == self.at
        if met and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            yield
        finally:
            if met:
                os.kill(os.getpid(), signal.SIGKILL)


def run_once(store: LocalStore, damage: Mapping[tuple[int, int], Damage]) -> None:
    """Execute the whole control path, or the rest of it after a kill."""
    pipeline = Pipeline(store, versions=VERSIONS, groups=GROUPS, group_size=1, keep_last=2, damage=damage)
    run_virtual(pipeline.run())


def killed(root: Path, at: int, damage: Mapping[tuple[int, int], Damage], *, after: bool) -> bool:
    """Execute the run in a child process; return True if the process was killed at its failpoint, and False if it
    finished.
    """
    child = FORK.Process(target=alone, args=(run_once, KillingStore(root, at=at, after=after), damage))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


@pytest.mark.many
@pytest.mark.parametrize(("start", "name"), enumerate(DAMAGES, 1), ids=DAMAGES)
def test_run_continues_after_a_kill_at_any_storage_write(tmp_path: Path, start: int, name: str) -> None:
    """With `make test`, each write is a failpoint in one of the four cases; with `make soak`, in all of them."""
    at, damage = 1 if ALL else start, DAMAGES[name]
    while survives(tmp_path / f"{at}-before", at, damage, after=False):
        assert survives(tmp_path / f"{at}-after", at, damage, after=True)
        at += 1 if ALL else len(DAMAGES)
    assert at > 5 * VERSIONS  # two writes per batch, three per version, and the writes of the start and of pruning


def survives(root: Path, at: int, damage: Mapping[tuple[int, int], Damage], *, after: bool) -> bool:
    """Kill a run at write `at`, kill the continued run at another write, and let the third process finish. Return
    whether write `at` was reached.
    """
    met = killed(root, at, damage, after=after)
    if not met:
        return False
    killed(root, 1 + at * 7 % 11, damage, after=not after)
    run_once(LocalStore(root), damage)
    report = audit(LocalStore(root), deep=True)
    assert report.violations == []
    assert report.versions == VERSIONS
    assert report.fates["trained"] == VERSIONS * GROUPS
    assert Log(LocalStore(root)).state.voids <= len(damage)
    return True


def work(root: Path, role: Literal["scheduler", "learner"]) -> None:
    """Work as the scheduler or the learner of a run: start from storage, and continue until the process is killed."""
    store = LocalStore(root)
    under = Log(store).state.newest_claim("supervisor")
    actor = Scheduler(store, under) if role == "scheduler" else Learner(store, under)
    while True:
        actor.log.follow()
        if isinstance(actor, Scheduler):
            if actor.next <= actor.log.state.version + 2:
                actor.commit()
        elif actor.log.state.version < 0 or actor.log.state.version in actor.log.state.waiting:
            actor.publish()
            if actor.log.state.releasable:
                actor.prune()


@pytest.mark.many
def test_kills_at_any_moment_leave_an_intact_log(tmp_path: Path) -> None:
    store, draw = LocalStore(tmp_path), random.Random(0)
    create_run(store)
    Supervisor(store)
    roles: dict[Literal["scheduler", "learner"], multiprocessing.process.BaseProcess] = {}
    for kill in range(KILLS):
        for role in ("scheduler", "learner"):
            if role not in roles:
                roles[role] = FORK.Process(target=work, args=(tmp_path, role), daemon=True)
                roles[role].start()
        time.sleep(draw.uniform(0.0, 0.3))
        victim = roles.pop(draw.choice(("scheduler", "learner")))
        victim.kill()
        victim.join(HANG_SECONDS)
        if kill % 20 == 19:
            Supervisor(store)
    for process in roles.values():
        process.kill()
        process.join(HANG_SECONDS)
    state = Log(store).state
    assert state.version > 0
    assert state.totals.groups["trained"] == log_actors.GROUPS * state.version
    assert chained(entries(store))
    assert all(store.exists(waiting.file.path) for waiting in state.waiting.values())
