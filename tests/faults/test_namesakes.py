"""Tests two runs with the same name, in two stores, on one Ray cluster: neither run uses actors of the other run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos import RECIPE, TIMING, Victim
from benchmarks.victims import kill_everything
from rollflow.flows.locations import attach_run
from rollflow.flows.ray_cluster.ray_head import RayHead

pytestmark = [pytest.mark.slow, pytest.mark.soak]
VERSIONS = 40


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayHead]:
    """Start a cluster that the runs do not own."""
    head = RayHead(tmp_path / "elsewhere", cpus=2)
    for name, value in head.env.items():
        monkeypatch.setenv(name, value)
    with head:
        yield head


def test_two_runs_with_one_name_both_succeed(tmp_path: Path, head: RayHead) -> None:
    """The second run starts while the first run trains, and continues after the first run has ended its actors."""
    options = "--set", f"cluster.address={head.address}"
    recipes = [
        RECIPE.format(seed=seed, versions=versions, engine="timed", timing=TIMING["timed"])
        for seed, versions in ((1, VERSIONS), (2, 2 * VERSIONS))
    ]
    first = Victim(tmp_path / "first", recipes[0], *options)
    victims = [first]
    try:
        first.wait_version(1, 300)
        victims.append(Victim(tmp_path / "second", recipes[1], *options))
        outcomes = [victim.finish([], 400) for victim in victims]
    finally:
        for victim in victims:
            kill_everything(victim.home)
    assert [outcome.violations for outcome in outcomes] == [[], []]
    assert [outcome.right for outcome in outcomes] == [True, True], [victim.tail() for victim in victims]
    contexts = [attach_run(victim.store.uri) for victim in victims]
    assert [context.run_id for context in contexts] == ["chaos", "chaos"]
    print([victim.recoveries.read() for victim in victims])
