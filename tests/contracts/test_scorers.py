"""The guarantees of every verifier, tested on each kind. To test a new verifier, add a line to CASES."""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from tokenizers import Tokenizer

from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score, Verifier, score_response
from rollflow.tasks.scorers.config import ExactReward, Format, ImportReward, ReasoningGymReward, RewardConfig
from rollflow.tasks.scorers.pool import RewardPool, ScoreRequest
from tests.support.user_code import FOLDER, put_in_reach
from tests.support.waiting import HANG_SECONDS


@dataclass(frozen=True)
class Case:
    """A verifier, the reference of one question, and a right answer."""

    config: RewardConfig
    reference: Mapping[str, Any]
    right: str = "17"


SUM = reasoning_gym.create_dataset("chain_sum", seed=3, size=1)[0]
FAMILY = {"family": "chain_sum", "answer": SUM["answer"], "metadata": SUM["metadata"]}
CASES = {
    "reasoning-gym": Case(ReasoningGymReward(), FAMILY, SUM["answer"]),
    "exact": Case(ExactReward(), {"family": None, "answer": 17}),
    "import": Case(ImportReward(path="letters.rewards:near", options={"width": 2}), {"answer": "17"}),
}
ODD = ("", " ", "none", "-1", "1e999", "\N{SUPERSCRIPT TWO}", "1 7", "\x00", "9" * 400, '{"answer": 17}', "a\nb")


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    put_in_reach(monkeypatch, FOLDER)
    found: Case = request.param
    return found


@pytest.fixture
def verify(case: Case) -> Verifier:
    return build_verifier(case.config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["1 + 1 = 2"] * 10).items():
        (path / name).write_bytes(data)
    return path


def test_there_is_a_case_for_every_kind() -> None:
    kinds = RewardConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(case.config) for case in CASES.values()} == set(kinds)


def test_right_answer_gets_full_reward_and_wrong_one_less(case: Case, verify: Verifier) -> None:
    assert verify(case.right, case.reference).reward == 1.0
    assert verify("1000001", case.reference).reward < 1.0


def test_score_is_a_finite_number_with_a_reason(case: Case, verify: Verifier) -> None:
    for response in (case.right, *ODD):
        score = verify(response, case.reference)
        assert math.isfinite(score.reward), response
        assert 0.0 <= score.reward <= 1.0, response
        assert score.reason, response


def test_score_does_not_depend_on_earlier_responses(case: Case, verify: Verifier) -> None:
    first = [verify(response, case.reference) for response in (case.right, *ODD)]
    assert [verify(response, case.reference) for response in (*ODD[::-1], case.right)] == first[::-1]
    assert [build_verifier(case.config)(response, case.reference) for response in (case.right, *ODD)] == first


def test_verifier_does_not_change_the_reference(case: Case, verify: Verifier) -> None:
    before = copy.deepcopy(dict(case.reference))
    for response in (case.right, *ODD):
        verify(response, case.reference)
    assert case.reference == before


def test_verifier_error_becomes_the_reason(case: Case, verify: Verifier) -> None:
    score = score_response(verify, "all", case.right, {"family": "no such family"})
    assert score.reward == 0.0
    assert score.reason.startswith("verifier failed: ")


async def test_worker_process_gives_the_same_scores(case: Case, verify: Verifier, folder: Path) -> None:
    tokenizer, pool = Tokenizer.from_file(str(folder / "tokenizer.json")), RewardPool(case.config, folder)
    await pool.start()
    try:
        tokens = [tokenizer.encode(text).ids for text in (case.right, "1000001", "")]
        requests = [ScoreRequest(one, case.reference) for one in tokens]
        found = await asyncio.wait_for(pool.score(requests), HANG_SECONDS)
    finally:
        await pool.close()
    expected = [score_response(verify, "all", tokenizer.decode(one), case.reference) for one in tokens]
    assert [(s.reward, s.reason) for s in found] == [(s.reward, s.reason) for s in expected]
    assert found[0].reward == 1.0


RIGHT, WRONG = "<answer>17</answer>", "<answer>18</answer>"
THOUGHT = "<think>.*</think>\\s*<answer>[^<]*</answer>"


@pytest.mark.parametrize(
    ("pattern", "response", "reward"),
    [
        (None, RIGHT, 1.0),
        (None, WRONG, 0.0),
        (None, "17", -0.25),
        (None, f"it is\n{RIGHT}\n, I think", 1.0),
        (None, "<answer>17", -0.25),
        (THOUGHT, f" <think>8\n+ 9</think>\n{RIGHT}\n", 1.0),
        (THOUGHT, f"<think>8 + 9</think>{WRONG}", 0.0),
        (THOUGHT, RIGHT, 0.75),
        (THOUGHT, f"<think>8 + 9</think>{RIGHT} Done.", 0.75),
        (THOUGHT, f"Well, <think>8 + 9</think>{WRONG}", -0.25),
    ],
)
def test_response_that_is_not_in_form_pays_the_price(pattern: str | None, response: str, reward: float) -> None:
    form = Format(penalty=0.25) if pattern is None else Format(penalty=0.25, pattern=pattern)
    score = score_response(build_verifier(ExactReward()), "tag", response, {"answer": 17}, form)
    assert score.reward == reward
    assert score.reason.startswith("not in its form; ") == (reward in (0.75, -0.25))


def test_verifier_error_is_reported_beside_the_form() -> None:
    score = score_response(
        build_verifier(ReasoningGymReward()), "tag", "17", {"family": "no such family"}, Format(penalty=0.25)
    )
    assert score.reward == -0.25
    assert score.reason.startswith("not in its form; verifier failed: ")


def test_form_costs_the_same_with_every_verifier(case: Case, verify: Verifier) -> None:
    """The oracle searches the tags as text, and subtracts the penalty from the score of the answer without a form."""
    for answer in (case.right, *ODD):
        for response in (answer, f"<answer>{answer}</answer>", f"</answer>{answer}<answer>"):
            plain = score_response(verify, "tag", response, case.reference)
            found = score_response(verify, "tag", response, case.reference, Format(penalty=0.5))
            opened = response.find("<answer>")
            tagged = opened >= 0 and response.find("</answer>", opened) >= 0
            assert found.reward == plain.reward - (0.0 if tagged else 0.5), response
            assert found.reason.endswith(plain.reason)


async def test_worker_process_checks_the_whole_responses_form(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pool = RewardPool(ExactReward(format=Format(pattern="\\d \\+ \\d = \\d", penalty=0.5)), folder)
    await pool.start()
    try:
        asked = ["1 + 1 = 2", "1 + 1 = 2 = 2", "2 + 2"]
        requests = [ScoreRequest(tokenizer.encode(text).ids, {"answer": "1 + 1 = 2"}) for text in asked]
        found = await asyncio.wait_for(pool.score(requests), HANG_SECONDS)
    finally:
        await pool.close()
    assert [score.reward for score in found] == [1.0, -0.5, -0.5]


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        (Score(1, "one", 3.0), Score(1.0, "one")),
        (Score(0.5, "x" * 100_000), Score(0.5, "x" * 1000)),
        (Score(0.5, "half \ud83d"), Score(0.5, r"half \ud83d")),
        (Score(0.5, None), Score(0.5, "None")),  # type: ignore[arg-type]
        (Score(math.inf, "much"), Score(0.0, "verifier failed: ValueError: its reward is inf")),
        (Score(-1e39, "more than a float32"), Score(0.0, "verifier failed: ValueError: its reward is -1e+39")),
        (Score(3e38, "as much as one"), Score(3e38, "as much as one")),
        (Score("1", "text"), Score(0.0, "verifier failed: TypeError: must be real number, not str")),  # type: ignore[arg-type]
        (1.0, Score(0.0, "verifier failed: AttributeError: 'float' object has no attribute 'reward'")),
    ],
)
def test_any_returned_score_can_be_stored(score: Score, kept: Score) -> None:
    assert replace(score_response(lambda _, __: score, "all", "", {}), seconds=0.0) == kept
    kept.reason.encode()
