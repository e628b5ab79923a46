"""Tests that a branch contains its parts in order, and that a new turn does not copy earlier parts."""

from __future__ import annotations

from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Int32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Episode
from rollflow.tasks.environments.turns import LivedBranch
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.scorers.base import Score
from tests.tasks.test_turns import Scripted, Step, play

PROMPT = ModelInput.of((7, 8))
# for each part: whether the policy generated it, its number of tokens, and whether the branch is read after it
PARTS = st.lists(st.tuples(st.booleans(), st.integers(0, 4), st.booleans()), max_size=8)


@given(PARTS)
def test_branch_contains_its_parts_in_order(parts: list[tuple[bool, int, bool]]) -> None:
    branch, number = LivedBranch(), count(100)
    tokens, sampled, versions = list[int](), list[bool](), list[int]()
    for version, (is_sampled, size, is_read) in enumerate(parts):
        new = [next(number) for _ in range(size)]
        if is_sampled:
            made = TokenSpan.of(new, [-0.5] * size, [version] * size)
            branch.add_generation(Generation("", made, StopReason.STOP), 0)
        else:
            branch.add_given(Int32s.of(new))
        tokens += new
        sampled += [is_sampled] * size
        versions += [version if is_sampled else -1] * size
        assert (branch.length, branch.follow(PROMPT)) == (len(tokens), ModelInput.of((7, 8, *tokens)))
        if is_read:
            assert branch.made.tokens == tokens
    logprobs = [-0.5 if one else 0.0 for one in sampled]
    assert branch.made == TokenSpan.of(tokens, logprobs, versions)
    assert branch.mask == bytes(sampled)


class Watched(Scripted):
    """Records the number of parts of the branch after its last turn."""

    parts = 0

    async def play(self, episode: Episode) -> Score | None:
        score = await super().play(episode)
        assert isinstance(episode, PlayedEpisode)
        self.parts = len(episode.lived.current._parts) // 3
        return score


def test_new_turn_does_not_copy_earlier_log_probs() -> None:
    watched = Watched([Step(added=3, said=2)] * 4)
    made = play(watched)
    assert (watched.parts, len(made.tokens)) == (8, 2 + 4 * 5)


def test_generation_of_a_single_turn_is_not_copied() -> None:
    branch, made = LivedBranch(), TokenSpan.of((1, 2), (-1.0, -1.0), (0, 0))
    branch.add_generation(Generation("", made, StopReason.STOP), 0)
    assert branch.made.tokens.data is made.tokens.data
    assert branch.ends_with(made.tokens)
    assert not branch.ends_with(Int32s.of((1, 2)))
