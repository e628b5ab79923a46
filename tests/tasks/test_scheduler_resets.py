"""Tests that the scheduler tells the environment which prompts start next (for resets ahead), and that this does not
change the committed batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Prompt
from rollflow.tasks.environments.base import Episode, ResettingEnvironment
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score
from tests.support.counts import examples
from tests.support.log_runs import read
from tests.support.pipeline import Pipeline

NUMBERS = itertools.count()  # the stores of two runs have different names


class Watching(ResettingEnvironment):
    """An environment of one turn that records for which prompts it would be reset, and which prompts it plays."""

    has_turns = False

    def __init__(self, most: int) -> None:
        self._most = most
        self.planned: set[str] = set()  # prompts for which the environment would be reset
        self.played: list[tuple[str, bool]] = []  # each prompt that began, and whether it was planned
        self.late: list[str] = []  # planned prompts that had begun before

    @property
    def resets_ahead(self) -> int:
        return self._most

    def reset_ahead(self, prompts: Sequence[Prompt], issued: Sequence[Prompt] = ()) -> None:
        assert len(prompts) <= self._most
        coming = {prompt.id for prompt in prompts}
        self.late += coming & {name for name, _ in self.played}
        self.planned = coming | self.planned & {prompt.id for prompt in issued}

    async def play(self, episode: Episode) -> Score | None:
        self.played.append((episode.prompt.id, episode.prompt.id in self.planned))
        made = await episode.generate()
        return None if made is None else await episode.judge(made.tokens)


def committed(most: int, **keys: Any) -> tuple[list[object], Watching]:
    """Run a pipeline; return its committed batches, and its environment."""
    watching = Watching(most)
    pipeline = Pipeline(MemoryStore(f"resets {next(NUMBERS)}"), environment=watching, **keys)
    run_virtual(pipeline.run())
    assert audit(pipeline.store).clean
    bodies = [one.body for one in read(pipeline.store)]
    found: list[object] = [
        (body.number, body.file.sha256, body.groups, body.issued, body.discards)
        for body in bodies
        if isinstance(body, BatchCommitted)
    ]
    return found, watching


@pytest.mark.many
@settings(max_examples=examples(160), deadline=None)
@given(
    most=st.integers(1, 20),
    alpha=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    slots=st.integers(2, 12),
    shares=st.sampled_from([(1.0,), (0.7, 0.3)]),
    choices=st.sampled_from([{}, {"tail_batching": True, "redundant_groups": 2, "redundant_responses": 1}]),
)
def test_resets_ahead_change_no_committed_batch(
    most: int, alpha: float, slots: int, shares: tuple[float, ...], choices: Mapping[str, Any]
) -> None:
    keys = {"async_ratio": alpha, "slots": slots, "shares": shares, "choices": choices}
    plain, idle = committed(0, **keys)
    assert committed(most, **keys)[0] == plain
    assert not any(planned for _, planned in idle.played)


def test_environment_is_told_most_prompts_before_they_start() -> None:
    """Only prompts that start at once when the first version exists cannot be planned."""
    for alpha in (0.0, 1.0):
        _, watching = committed(8, slots=4, async_ratio=alpha)
        unplanned = [name for name, planned in watching.played if not planned]
        assert len(unplanned) < len(watching.played) / 2
        assert watching.late == []
