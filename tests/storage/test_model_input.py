"""Tests of model inputs: the order of their parts, their flat form, and components that read only tokens."""

from __future__ import annotations

import asyncio
import pickle
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import NO_TOKEN, ForeignPart, ModelInput, PlacedPart
from rollflow.storage.records import Prompt, Trajectory
from rollflow.storage.token_arrays import Int32s
from tests.support.batches import group

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=4).map(Int32s.of)
IMAGE = ForeignPart("image", "5e" * 32, 3)
FOREIGN = st.builds(ForeignPart, st.sampled_from(["image", "sound"]), st.just("5e" * 32), st.integers(1, 4))
PARTS = st.lists(st.one_of(TOKENS, FOREIGN), max_size=5)
MIXED = ModelInput.from_parts([Int32s.of((5, 6)), IMAGE, Int32s.of((7,))])


@given(PARTS)
def test_model_input_is_rebuilt_from_its_flat_form(parts: list[Int32s | ForeignPart]) -> None:
    whole = ModelInput.from_parts(parts)
    assert whole == ModelInput.from_flat(whole.flat, whole.placed) == ModelInput.from_parts(whole.parts)
    assert [part for part in whole.parts if isinstance(part, ForeignPart)] == [part for _, part in whole.placed]
    assert all(isinstance(one, ForeignPart) or isinstance(other, ForeignPart) for one, other in pairwise(whole.parts))
    assert hash(whole) == hash(ModelInput.from_flat(whole.flat, whole.placed))
    assert pickle.loads(pickle.dumps(whole)) == whole  # noqa: S301  made right here
    assert len(whole.flat) == whole.length == sum(one.length for one in map(ModelInput.from_parts, zip(parts)))
    assert [part for _, part in whole.placed] == [part for part in parts if isinstance(part, ForeignPart)]
    for position, part in whole.placed:
        assert set(whole.flat[position : position + part.length]) == {NO_TOKEN}


@given(PARTS, TOKENS)
def test_model_input_joins_appended_tokens_to_its_last_part(parts: list[Int32s | ForeignPart], more: Int32s) -> None:
    assert ModelInput.from_parts(parts).followed_by(more) == ModelInput.from_parts([*parts, more])


def test_model_input_of_tokens_only_is_not_copied() -> None:
    """An input of tokens needs little memory: its flat form is the array from which the input was created."""
    array = Int32s.of((1, 2))
    whole = ModelInput.of(array)
    assert whole.tokens is whole.flat is array
    assert (whole.placed, whole.parts) == ((), (array,))
    assert sys.getsizeof(whole) <= 48
    assert ModelInput.of(()) == ModelInput.from_parts([Int32s(), Int32s()])
    assert ModelInput.of(()).parts == ModelInput.of(()).tokens == ()


def test_different_model_inputs_are_not_equal() -> None:
    image = MIXED.parts[1]
    assert isinstance(image, ForeignPart)
    others = [
        ModelInput.of(MIXED.flat),  # the same flat tokens without the image
        ModelInput.from_parts([Int32s.of((5, 6)), replace(image, sha256="00" * 32), Int32s.of((7,))]),
        ModelInput.from_parts([Int32s.of((5,)), image, Int32s.of((6, 7))]),
    ]
    assert len({MIXED, *others}) == 4


def test_text_only_reader_refuses_a_prompt_with_an_image() -> None:
    sentence = "the learner reads tokens alone, but the input has a part of the kind 'image' at position 2 "
    with pytest.raises(ConfigError, match=sentence) as refused:
        MIXED.read_tokens("the learner")
    assert str(refused.value).endswith("(sha256 5e5e5e5e5e5e, 3 positions); use prompts of text")
    with pytest.raises(ConfigError, match="'image' at position 2"):
        _ = Prompt("p", 0, "d", "What is this?", MIXED).tokens


@pytest.mark.parametrize("position", [-1, 4, 100])
def test_stored_image_at_an_invalid_position_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=f"a part of 3 positions does not fit at position {position} of an input of 6"):
        ModelInput.from_flat(MIXED.flat, [PlacedPart(position, IMAGE)])
    with pytest.raises(ValueError, match="does not fit at position 4"):
        ModelInput.from_flat(Int32s.same(0, 9), [PlacedPart(2, IMAGE), PlacedPart(4, IMAGE)])


def with_image(of: Trajectory) -> Trajectory:
    """Return a trajectory whose prompt has an image, and whose response has two tokens."""
    given = MIXED.length
    values: dict[str, Any] = {
        "tokens": MIXED.flat + Int32s.of((8, 9)),
        "loss_mask": (False,) * given + (True, True),
        "logprobs": (0.0,) * given + (-0.5, -0.25),
        "versions": (NO_TOKEN,) * given + (0, 0),
    }
    return replace(of, **values, foreign_parts=MIXED.placed)


def test_stored_trajectory_keeps_the_image_in_its_prompt() -> None:
    bare = group(0)
    made = replace(bare, trajectories=(with_image(bare.trajectories[0]), bare.trajectories[1]))
    batch = TrajectoryBatch.from_bytes(TrajectoryBatch.from_groups([made]).to_bytes())
    assert batch.groups() == [made]
    first, second = batch.groups()[0].trajectories
    assert first.input == MIXED.followed_by(Int32s.of((8, 9)))
    assert second.input == ModelInput.of(second.tokens)
    assert batch.foreign_parts == [MIXED.placed, ()]


def test_learner_refuses_a_batch_with_an_image() -> None:
    from rollflow.tasks.objectives.rows import BatchRows

    bare = group(0)
    made = replace(bare, trajectories=(bare.trajectories[0], with_image(bare.trajectories[1])))
    with pytest.raises(ConfigError, match=r"the learner reads tokens alone, .* kind 'image' at position 2"):
        BatchRows.of(TrajectoryBatch.from_groups([made]))


def test_episode_passes_its_image_to_engine_and_batch() -> None:
    from rollflow.storage.records import StopReason
    from rollflow.tasks.engines.base import Generation, TokenSpan
    from rollflow.tasks.environments.single_turn import SINGLE_TURN
    from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
    from rollflow.tasks.rollout.proxy import VersionedGeneration
    from rollflow.tasks.scorers.base import Score, ScoreRequest

    asked = list[ModelInput]()

    async def ask(turn: Turn) -> VersionedGeneration:
        asked.append(turn.prompt)
        return VersionedGeneration(Generation("r", TokenSpan.of((8, 9), (-0.5, -0.25), (0, 0)), StopReason.STOP), 0)

    async def want(episode: PlayedEpisode) -> bool:
        return True

    async def score(request: ScoreRequest) -> Score:
        return Score(1.0)

    async def play() -> Trajectory:
        episode = PlayedEpisode(Prompt("p", 0, "d", "What is this?", MIXED), 9, ask, want, score)
        found = await episode.play(SINGLE_TURN)
        assert found is not None
        assert episode._build_turn((), None).prompt == MIXED.followed_by(Int32s.of((8, 9)))
        return episode.trajectories(found)[0]

    one = asyncio.run(play())
    assert asked == [MIXED]
    assert one.input == MIXED.followed_by(Int32s.of((8, 9)))
    assert (one.foreign_parts, one.response_tokens, len(one.loss_mask)) == (MIXED.placed, 2, MIXED.length + 2)


def test_audit_finds_a_trajectory_with_another_image() -> None:
    from rollflow.storage.audit.answers import ExpectedRows, check_rows

    bare = group(0)
    made = replace(bare, trajectories=tuple(map(with_image, bare.trajectories)))
    batch = TrajectoryBatch.from_groups([made])
    other = ModelInput.from_parts([Int32s.of((5, 6)), replace(IMAGE, sha256="00" * 32), Int32s.of((7,))])
    same, swapped, absent = (
        list(check_rows(batch, ExpectedRows(prompts={0: Prompt("p0", 0, "test", "", asked)})))
        for asked in (MIXED, other, ModelInput.of(MIXED.flat))
    )
    assert same == []
    assert [kind for kind, _ in swapped] == [kind for kind, _ in absent] == ["lineage"]
    assert "a row of prompt 0 begins with other tokens" in swapped[0][1]
