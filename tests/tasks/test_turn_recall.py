"""Random crashes of runs with several turns: whatever was stored, audits pass, and alpha = 0 stays reproducible."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, Literal, get_args

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.run_records.finished_turns import FOLDER, decode_turns, encode_turns
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from tests.support.counts import examples
from tests.support.pipeline import Pipeline
from tests.tasks.test_scheduler import trained

Mode = Literal["off", "background", "before-action"]


class Talking(Environment):
    """An episode of `turns` turns. With `forgets`, each second turn begins with a context without earlier turns."""

    def __init__(self, turns: int, *, forgets: bool) -> None:
        self.turns, self.forgets = turns, forgets

    async def play(self, episode: Episode) -> Score | None:
        made = None
        for number in range(self.turns):
            if number % 2 and self.forgets:
                episode.start_branch((7, number))
            await asyncio.sleep(0.05)
            made = await episode.generate(max_tokens=4)
            if made is None:
                return None
            episode.reward(float(number))
            if number + 1 < self.turns:
                episode.add((number,))
        assert made is not None
        return await episode.judge(made.tokens)


def play(store: MemoryStore, mode: Mode, until: float | None = None, **keys: Any) -> None:
    """Run to the end, or stop the process after some seconds."""
    environment = Talking(keys.pop("turns"), forgets=keys.pop("forgets"))
    pipeline = Pipeline(store, versions=3, groups=2, environment=environment, durable_turns=mode, **keys)

    async def run() -> None:
        task = asyncio.create_task(pipeline.run())
        await asyncio.wait([task], timeout=until)
        task.cancel()
        [outcome] = await asyncio.gather(task, return_exceptions=True)
        if outcome is not None and not isinstance(outcome, asyncio.CancelledError):
            raise outcome

    run_virtual(run())


def lose_turns(store: MemoryStore, lost: set[int]) -> None:
    """Remove the stored turns with these numbers, in the order of the files."""
    number = 0
    for path in list(store.list(FOLDER)):
        stored = decode_turns(store.get(path))
        store.put(path, encode_turns([one for place, one in enumerate(stored, number) if place not in lost]))
        number += len(stored)


def list_rows(store: MemoryStore) -> list[Any]:
    """Return the reproducible parts of the trained rows."""
    return [
        (group.key, one.sample, tuple(one.tokens), tuple(one.versions), one.reward, one.branch)
        for _, batch in trained(store)
        for group in batch.groups()
        for one in group.trajectories
    ]


@settings(max_examples=examples(400), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(get_args(Mode)),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([0.0, 1.0, 2.5]),
    st.sampled_from(["started", "oldest-token"]),
    st.lists(st.floats(0.05, 2.0), max_size=3),
    st.sets(st.integers(0, 20)),
)
@example("background", 2, True, 2.5, "started", [0.5, 0.9], {0, 2, 4, 6, 8, 10, 12, 14})
def test_random_crashes_keep_the_invariants_of_turns(
    mode: Mode, turns: int, forgets: bool, alpha: float, staleness: str, stops: list[float], lost: set[int]
) -> None:
    """`lost` are the numbers of the stored turns that the next process does not find."""
    assert RolloutConfig(durable_turns=mode).durable_turns == mode
    store = MemoryStore(uuid.uuid4().hex)
    keys = {"turns": turns, "forgets": forgets, "async_ratio": alpha, "choices": {"staleness_from": staleness}}
    for after in stops:
        play(store, mode, after, **keys)
        lose_turns(store, lost)
    play(store, mode, **keys)
    report = audit(store)
    assert report.clean, report.violations
    if alpha == 0.0:
        quiet = MemoryStore(uuid.uuid4().hex)
        play(quiet, "off", **keys)
        assert list_rows(store) == list_rows(quiet)
