"""Values of tokens and steps: from the text that a scorer reads to the trajectory's tokens."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Outcome, Prompt, StopReason, Trajectory
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.base import Environment, Episode
from rollflow.tasks.environments.imported import ImportedEnvironment
from rollflow.tasks.environments.single_turn import SINGLE_TURN
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import END, build_cold_folder
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.rollout.config import FilterConfig
from rollflow.tasks.rollout.episode import PlayedEpisode
from rollflow.tasks.rollout.limits import filter_reason
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.scorers import build_scorer, build_verifier
from rollflow.tasks.scorers.base import Score, ScoreRequest, validate_score
from rollflow.tasks.scorers.config import CompositeReward, ExactReward, ImportReward, RewardConfig
from rollflow.tasks.scorers.token_values import move_to_sampled, place_values, split_steps
from rollflow.tasks.scorers.verifier import find_answer, score_response
from tests.support.waiting import HANG_SECONDS

FUNCTIONS = "tests.support.scoring_functions"
ALL = ExactReward()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a policy with a byte-level tokenizer; most of its tokens are single bytes."""
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["2+2=4. So it is 5."] * 10).items():
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PolicyTokenizer:
    return PolicyTokenizer(folder)


def places_of(score: Score) -> dict[int, float]:
    """Return the values of a score's tokens by their positions."""
    return {at: value for at, value in enumerate(score.token_values) if value is not None and not math.isnan(value)}


def placed(tokenizer: PolicyTokenizer, text: str, score: Score, config: RewardConfig = ALL) -> Score:
    tokens = tokenizer.encode_response(text)
    return place_values(validate_score("verifier", score), config, tokenizer, tokens, tokenizer.decode_response(tokens))


# --- from text to tokens --------------------------------------------------------------------------------------------


def test_split_steps_returns_the_end_of_each_step() -> None:
    text = "a b\n\n  \n\nc\n\n"
    steps = split_steps(text)
    assert steps == [(3, "a b"), (10, "c")]
    assert [text[:end].endswith(step) for end, step in steps] == [True, True]
    assert split_steps("a; b", "; ") == [(1, "a"), (4, "b")]
    assert split_steps("") == []


@pytest.mark.parametrize(
    ("response", "where", "start", "answer"),
    [
        (" ab \n", "all", 1, "ab"),
        ("  ", "all", 2, ""),
        ("<answer>1</answer>, <answer> 2 </answer>", "tag", 29, "2"),
        ("no tag", "tag", 0, ""),
    ],
)
def test_answer_is_found_with_its_start_position(response: str, where: str, start: int, answer: str) -> None:
    assert find_answer(response, where) == (start, answer)
    assert response[start : start + len(answer)] == answer


def test_step_value_goes_to_the_token_of_its_last_character(tokenizer: PolicyTokenizer) -> None:
    text = "2+2=4.\n\nSo it is \U0001f642.\n\n5"
    score = placed(tokenizer, text, Score(1.0, step_values=[(end, float(end)) for end, _ in split_steps(text)]))
    tokens = tokenizer.encode_response(text)
    assert len(score.token_values) == len(tokens)
    assert score.step_values == ()
    assert list(places_of(score).values()) == [6.0, 19.0, 22.0]
    for at, end in zip(places_of(score), (6, 19, 22), strict=True):
        assert tokenizer.decode(tokens[: at + 1])[:end] == text[:end]
        assert len(tokenizer.decode(tokens[:at])) < end or "\ufffd" in tokenizer.decode(tokens[:at])


def test_step_value_goes_to_the_last_token_of_a_character(tokenizer: PolicyTokenizer) -> None:
    """The character has several tokens, and the step ends at the last one."""
    tokens = tokenizer.encode_response("\U0001f642")
    assert len(tokens) > 1
    assert places_of(placed(tokenizer, "\U0001f642", Score(0.0, step_values=[(1, 2.0)]))) == {len(tokens) - 1: 2.0}


def test_value_of_an_incomplete_character_goes_to_last_token(tokenizer: PolicyTokenizer) -> None:
    tokens = tokenizer.encode_response("a\U0001f642")[:-1]
    response = tokenizer.decode_response(tokens)
    score = place_values(Score(0.0, step_values=[(len(response), 1.0)]), ALL, tokenizer, tokens, response)
    assert places_of(score) == {len(tokens) - 1: 1.0}


def test_values_of_steps_at_the_same_token_are_added(tokenizer: PolicyTokenizer) -> None:
    assert places_of(placed(tokenizer, "5", Score(0.0, step_values=[(1, 2.0), (1, -0.5)]))) == {0: 1.5}


def test_step_values_are_added_to_token_values(tokenizer: PolicyTokenizer) -> None:
    count = len(tokenizer.encode_response("5.5"))
    score = Score(0.0, token_values=[None, *[0.25] * (count - 1)], step_values=[(1, 1.0), (3, 1.0)])
    assert places_of(placed(tokenizer, "5.5", score)) == {
        0: 1.0,
        **dict.fromkeys(range(1, count - 1), 0.25),
        count - 1: 1.25,
    }


def test_step_ends_are_positions_in_the_scored_text(tokenizer: PolicyTokenizer) -> None:
    """The scorer sees only `55`; the stop token is not part of the text."""
    text = f"so <answer> 55</answer>{END}"
    config = ExactReward(answer="tag")
    score = placed(tokenizer, text, Score(0.0, step_values=[(1, 1.0), (2, 2.0)]), config)
    tokens = tokenizer.encode_response(text)
    ends = [tokenizer.decode(tokens[: at + 1]) for at in places_of(score)]
    assert ends[-1].endswith("55")
    assert sum(places_of(score).values()) == 3.0


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (Score(1.0, token_values=[0.5]), "the score has 1 token values, but the response has 3 tokens"),
        (Score(1.0, token_values=[0.5] * 4), "the score has 4 token values, but the response has 3 tokens"),
        (Score(1.0, token_values=[0.5, math.nan, 0.5]), "a token value is nan, which is not a finite float32 number"),
        (Score(1.0, token_values=[0.5, 1e39, 0.5]), "a token value is 1e+39, which is not a finite float32 number"),
        (Score(1.0, token_values=["1"] * 3), "a token value must be a number, not a str"),  # type: ignore[list-item]
        (
            Score(1.0, step_values=[(4, 1.0)]),
            "a step must end after 1 to 3 characters, the length of the text, but one ends after 4",
        ),
        (
            Score(1.0, step_values=[(0, 1.0)]),
            "a step must end after 1 to 3 characters, the length of the text, but one ends after 0",
        ),
        (Score(1.0, step_values=[(1, math.inf)]), "a step value is inf, which is not a finite float32 number"),
        (Score(1.0, step_values=[(1.5, 1.0)]), "'float' object cannot be interpreted as an integer"),  # type: ignore[list-item]
        (Score(1.0, step_values=[1.0]), "cannot unpack non-iterable float object"),  # type: ignore[list-item]
    ],
)
def test_invalid_token_values_fail_the_response(tokenizer: PolicyTokenizer, score: Score, reason: str) -> None:
    assert len(tokenizer.encode_response("a.b")) == 3
    found = placed(tokenizer, "a.b", score)
    assert (found.value, found.outcome, found.has_token_values) == (0.0, Outcome.UNPARSABLE, False)
    assert reason in found.reason


@pytest.mark.parametrize("given", [{"token_values": [0.5]}, {"step_values": [(9, 1.0)]}, {"value": math.nan}])
def test_unjudged_response_has_no_token_values(tokenizer: PolicyTokenizer, given: dict[str, Any]) -> None:
    """An unjudged response stays unjudged even if its token values are invalid; a failed one would be trained on as
    0.
    """
    found = placed(tokenizer, "a.b", Score(**{"value": 0.7, "outcome": Outcome.UNJUDGED, **given}))
    assert (found.value, found.outcome, found.has_token_values) == (0.0, Outcome.UNJUDGED, False)


def test_token_values_are_equal_after_serialization() -> None:
    score = validate_score("", Score(0.5, token_values=[0.1, None, -3.0], parts={"a": 1.0}))
    sent = json.loads(json.dumps(score.to_columns()))
    assert Score.of_columns(sent) == score
    plain = Score(0.5, version="0123456789ab")
    assert Score.of_columns(plain.to_columns()) == plain
    assert Score.of_columns(plain.to_columns()[:6]).version == plain.version


def test_sum_of_large_step_values_stays_finite(tokenizer: PolicyTokenizer) -> None:
    score = placed(tokenizer, "5", Score(0.0, step_values=[(1, 3e38), (1, 3e38)]))
    assert np.isfinite(Float32s.of(score.token_values).array).all()  # type: ignore[arg-type]


def test_step_scorer_example_in_the_docs_scores_each_step(tokenizer: PolicyTokenizer) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/own_parts.md").read_text()
    [code] = [block for block in page.split("```python\n") if "def right_steps" in block]
    made: dict[str, Any] = {}
    exec(code.split("```")[0], made)
    text = "2+2=4\n4+1=6\n6+1=7"
    score = score_response(made["right_steps"], "all", text, {"answer": "7"})
    assert (score.value, score.step_values) == (1.0, ((5, 1.0), (11, 0.0), (17, 1.0)))
    assert list(places_of(placed(tokenizer, text, score)).values()) == [1.0, 0.0, 1.0]


# --- composite --------------------------------------------------------------------------------------------------------


def composite(*parts: str, answer: str = "all", **keys: Any) -> CompositeReward:
    made = {
        f"p{number}": {
            "weight": 2.0 - 3 * number,
            "scorer": {"kind": "import", "path": f"{FUNCTIONS}:{name}", "answer": answer},
        }
        for number, name in enumerate(parts)
    }
    return CompositeReward.model_validate({"parts": made, **keys})


def scored(config: CompositeReward, tokenizer: PolicyTokenizer, text: str) -> Score:
    tokens = tokenizer.encode_response(text)
    score = score_response(partial(build_verifier(config), tokens=tokens), config.answer, text, {})
    return place_values(score, config, tokenizer, tokens, text)


def test_composite_scorer_adds_weighted_token_values(tokenizer: PolicyTokenizer) -> None:
    """`steps` gives 0.5 at the end of each line, `each_token` gives 0.25 to each token, with the weights 2 and -1."""
    text = "5.\n5."
    found = places_of(scored(composite("steps", "each_token"), tokenizer, text))
    count = len(tokenizer.encode_response(text))
    ends = {at for at, value in found.items() if value == 1.0 - 0.25}
    assert {*found.values()} == {-0.25, 0.75}
    assert (len(found), len(ends), max(ends)) == (count, 2, count - 1)


def test_composite_part_scores_its_own_answer_format(tokenizer: PolicyTokenizer) -> None:
    text = " so <answer> 5\n5</answer>."
    config = composite("steps", answer="tag")
    found = places_of(scored(config, tokenizer, text))
    tokens = tokenizer.encode_response(text)
    assert [tokenizer.decode(tokens[: at + 1])[-1] for at in found] == ["5", "5"]
    assert {*found.values()} == {1.0}


def test_composite_without_a_required_part_has_no_values(tokenizer: PolicyTokenizer) -> None:
    found = scored(composite("steps", "wrong", requires=["p1"]), tokenizer, "5")
    assert (found.value, found.has_token_values) == (0.0, False)


def test_composite_fails_if_parts_have_unequal_token_counts(tokenizer: PolicyTokenizer) -> None:
    found = scored(composite("each_token", "one_token_value"), tokenizer, "5.5")
    assert "the parts give values for different numbers of tokens (3, 1)" in found.reason
    assert not found.has_token_values


@pytest.mark.long
@pytest.mark.parametrize("parts", [("each_token", "one_token_value"), ("steps", "later")])
async def test_failure_outside_of_the_parts_scores_lowest(folder: Path, parts: tuple[str, ...]) -> None:
    """The weights are 2 and -1; the sums of the first two parts have different lengths, and the last part cancels."""
    scorer = build_scorer(composite(*parts), folder)
    await scorer.start()
    try:
        [found] = await asyncio.wait_for(scorer.score([ScoreRequest([1, 2], {"cancels": True})]), HANG_SECONDS)
    finally:
        await scorer.close()
    assert (found.value, found.outcome) == (-1.0, Outcome.UNPARSABLE)


# --- worker processes -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("form", ["steps", "steps_later", "steps_of_several"])
async def test_worker_assigns_step_values_to_tokens(folder: Path, tokenizer: PolicyTokenizer, form: str) -> None:
    """The third response is so long that its score does not fit into a pipe's usual line of 64 KiB."""
    texts = ["5.\n5.", "5", "5.\n" * 5000 + "5", ""]
    tokens = [tokenizer.encode_response(text) for text in texts]
    scorer = build_scorer(ImportReward(path=f"{FUNCTIONS}:{form}"), folder)
    await scorer.start()
    try:
        scores = await asyncio.wait_for(scorer.score([ScoreRequest(one, {}) for one in tokens]), HANG_SECONDS)
    finally:
        await scorer.close()
    assert [score.outcome for score in scores] == [Outcome.CORRECT] * 4, scores[2].reason
    assert [len(score.token_values) for score in scores] == [*map(len, tokens[:3]), 0]
    assert [len(places_of(score)) for score in scores] == [2, 1, 5001, 0]


@pytest.mark.long
@pytest.mark.parametrize("form", ["each_token", "each_token_later", "each_token_of_several"])
async def test_worker_passes_tokens_to_a_scorer(folder: Path, tokenizer: PolicyTokenizer, form: str) -> None:
    """The tokens include the stop token, which is not part of the text."""
    tokens = [tokenizer.encode_response(text) for text in (f"5.5{END}", "5", END)]
    scorer = build_scorer(ImportReward(path=f"{FUNCTIONS}:{form}"), folder)
    await scorer.start()
    try:
        scores = await asyncio.wait_for(scorer.score([ScoreRequest(one, {}) for one in tokens]), HANG_SECONDS)
    finally:
        await scorer.close()
    assert [list(score.token_values) for score in scores] == [[0.25] * len(one) for one in tokens]


def test_verifier_option_named_tokens_is_not_replaced() -> None:
    """Only an argument without a default gets the tokens."""
    path = f"{FUNCTIONS}:optional_tokens"
    assert build_verifier(ImportReward(path=path))("5", {}, [1, 2, 3]) == 2.0
    assert build_verifier(ImportReward(path=path, options={"tokens": 7}))("5", {}, [1, 2, 3]) == 7.0
    with pytest.raises(ConfigError, match="toks"):
        build_verifier(ImportReward(path=path, options={"toks": 7}))


# --- episodes -------------------------------------------------------------------------------------------------------


def test_token_values_move_to_the_last_sampled_token() -> None:
    """Tokens 1 and 4 were sampled. The value of token 0 is before any action."""
    values = [1.0, 2.0, 4.0, math.nan, math.nan, 8.0]
    found = move_to_sampled(values, np.array([0, 1, 0, 0, 1, 0], bool))
    assert found is not None
    assert [None if math.isnan(value) else value for value in found] == [None, 6.0, None, None, 8.0, None]
    assert move_to_sampled([1.0, math.nan], np.array([0, 1], bool)) is None


def test_token_value_of_negative_zero_is_stored_unchanged() -> None:
    """`rollflow rejudge` compares bits."""
    values = validate_score("", Score(1.0, token_values=[-0.0, -1.0])).token_values
    assert move_to_sampled(values, np.array([1, 1], bool)) == values  # type: ignore[arg-type]


SAID = ((7, 8, 9), (10, 11))


class Turns(Environment):
    """Two generations with two tokens of the environment between them, and then a score."""

    def __init__(self, whole: bool = True, **given: Any) -> None:
        self.whole, self.given = whole, given

    async def play(self, episode: Episode) -> Score | None:
        await episode.generate()
        episode.add([5, 6])
        made = await episode.generate()
        assert made is not None
        if self.given:
            return Score(1.0, **self.given)
        return await episode.judge(episode.response if self.whole else made.tokens)


async def play(environment: Environment, score: Mapping[str, Any] | None = None) -> tuple[Score, Trajectory]:
    """Play an episode whose scorer gives these values, by default each token's position among the scored tokens."""
    left = list(SAID)

    async def ask(turn: Any) -> VersionedGeneration:
        tokens = left.pop(0)
        span = TokenSpan.of(tokens, (-1.0,) * len(tokens), (0,) * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def closed(_: PlayedEpisode) -> bool:
        return True

    async def judge(request: ScoreRequest) -> Score:
        values = Float32s.of([float(at) for at, _ in enumerate(request.tokens)])
        return Score(1.0, **({"token_values": values} if score is None else score))

    prompt = Prompt("p", 0, "d", "", ModelInput.of((1, 2)))
    episode = PlayedEpisode(prompt, 100, ask, closed, judge)
    found = await episode.play(environment)
    assert found is not None
    [one] = episode.trajectories(found)
    return found, one


def imported(environment: Environment) -> ImportedEnvironment:
    """Return the wrapper of a user-defined environment."""
    made = object.__new__(ImportedEnvironment)
    made._own, made._name = environment, "environment"
    return made


def rewards_of(one: Trajectory) -> list[float | None]:
    return [None if math.isnan(value) else value for value in one.token_rewards or ()]


async def test_token_rewards_of_a_single_turn_are_stored() -> None:
    _, one = await play(SINGLE_TURN)
    assert rewards_of(one) == [None, None, 0.0, 1.0, 2.0]
    _, one = await play(SINGLE_TURN, {})
    assert one.token_rewards is None
    assert one.total_reward == 1.0


@pytest.mark.parametrize("wrap", [lambda one: one, imported])
async def test_token_rewards_of_several_turns_are_stored(wrap: Any) -> None:
    """The values 3 and 4 of the environment's tokens count at the last token of the first turn."""
    _, one = await play(wrap(Turns()))
    assert rewards_of(one) == [None, None, 0.0, 1.0, 2.0 + 3.0 + 4.0, None, None, 5.0, 6.0]
    assert one.total_reward == 1.0 + sum(range(7))
    _, one = await play(wrap(Turns(whole=False)))
    assert rewards_of(one) == [None] * 7 + [0.0, 1.0]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"token_values": [1.0]}, "the score has 1 token values, but the response has 7 tokens"),
        (
            {"step_values": [(1, 1.0)]},
            "an environment returned a score with step_values, which only scorers may use; return",
        ),
        ({"token_values": [math.inf] * 7}, "a token value is inf"),
    ],
)
async def test_invalid_token_values_of_an_environment_fail(given: dict[str, Any], reason: str) -> None:
    score, one = await play(imported(Turns(**given)))
    assert reason in score.reason
    assert (one.reward, one.token_rewards) == (0.0, None)


async def test_environment_may_set_token_values_itself() -> None:
    _, one = await play(imported(Turns(token_values=[0.5, *[None] * 6])))
    assert rewards_of(one) == [None, None, 0.5, *[None] * 6]


async def test_token_values_for_other_tokens_fail_the_response() -> None:
    class Elsewhere(Turns):
        async def play(self, episode: Episode) -> Score | None:
            await super().play(episode)
            return await episode.score([1, 1])

    score, _ = await play(imported(Elsewhere()))
    assert "the scorer gave values to tokens with which the response does not end" in score.reason


def test_prompt_filter_counts_token_rewards() -> None:
    """Two responses of the same reward differ by the rewards of their tokens."""
    one = Trajectory(0, 0, (1, 2), (False, True), (0.0, -1.0), (-1, 0), 1.0, "", StopReason.STOP)
    other = replace(one, token_rewards=Float32s.of([math.nan, 0.5]))
    rules = FilterConfig(min_std=0.0)
    assert filter_reason(rules, [one.total_reward, one.total_reward]) is not None
    assert filter_reason(rules, [one.total_reward, other.total_reward]) is None
