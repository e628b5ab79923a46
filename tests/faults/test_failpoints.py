"""SIGKILL just before and just after every single store write of a run: it goes on, and nothing is lost or doubled.

A child process runs the whole control path on a folder and kills itself at its n-th write; the parent walks n over
all writes there are, until a run gets through. Each killed run is killed once more on its way back.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rollflow.storage.audit import audit
from rollflow.storage.objects.base import Data
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.clock import run_virtual
from tests.support.pipeline import Damage, Pipeline

pytestmark = pytest.mark.slow

VERSIONS, GROUPS = 4, 2
FORK = multiprocessing.get_context("fork")  # a fresh interpreter for each of some hundred points would take minutes


@dataclass(frozen=True)
class KillingStore(LocalStore):
    """A folder whose writer dies at the `at`-th write, before or after it is done."""

    at: int = 0
    after: bool = False
    writes: list[str] = field(default_factory=list, compare=False)

    def put(self, path: str, data: Data) -> str:
        self._point(path, after=False)
        digest = super().put(path, data)
        self._point(path, after=True)
        return digest

    def create(self, path: str, data: Data) -> None:
        self._point(path, after=False)
        super().create(path, data)
        self._point(path, after=True)

    def create_naming(self, path: str, content: Callable[[str], Data], file: str, data: Data) -> str:
        """Two writes, and what lies between them: the file has its name, the object that names it is not there."""

        def between(sha256: str) -> Data:
            self._point(file, after=True)
            self._point(path, after=False)
            return content(sha256)

        self._point(file, after=False)
        sha256 = super().create_naming(path, between, file, data)
        self._point(path, after=True)
        return sha256

    def delete(self, path: str) -> None:
        self._point(path, after=False)
        super().delete(path)
        self._point(path, after=True)

    def _point(self, path: str, *, after: bool) -> None:
        if not after:
            self.writes.append(path)
        if len(self.writes) == self.at and after == self.after:
            os.kill(os.getpid(), signal.SIGKILL)


def run_once(store: LocalStore, damage: Mapping[tuple[int, int], Damage]) -> None:
    """A run of the whole control path, or what is left of it."""
    pipeline = Pipeline(store, versions=VERSIONS, groups=GROUPS, group_size=1, keep_last=2, damage=damage)
    run_virtual(pipeline.run())


def killed(root: Path, at: int, damage: Mapping[tuple[int, int], Damage], *, after: bool) -> bool:
    """Run in a child process; whether it died of its failpoint (else it ended well)."""
    child = FORK.Process(target=run_once, args=(KillingStore(root, at=at, after=after), damage))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


@pytest.mark.parametrize("damage", [{}, {(1, 0): "cut"}, {(2, 0): "commit"}], ids=["sound", "file", "commit"])
def test_killed_around_every_write(tmp_path: Path, damage: Mapping[tuple[int, int], Damage]) -> None:
    at = 1
    while survives(tmp_path / f"{at}-before", at, damage, after=False):
        assert survives(tmp_path / f"{at}-after", at, damage, after=True)
        at += 1
    assert at > 5 * VERSIONS  # two writes a batch, two a version and those of the beginning


def survives(root: Path, at: int, damage: Mapping[tuple[int, int], Damage], *, after: bool) -> bool:
    """Kill a run at a write, kill its successor at some write of its own, let the third end; whether `at` was met."""
    met = killed(root, at, damage, after=after)
    if not met:
        return False
    killed(root, 1 + at * 7 % 11, damage, after=not after)
    run_once(LocalStore(root), damage)
    report = audit(LocalStore(root))
    assert report.violations == []
    assert report.versions == VERSIONS
    assert report.fates["trained"] == VERSIONS * GROUPS
    assert len(TrajectoryStore(LocalStore(root)).voids()) <= len(damage)
    return True
