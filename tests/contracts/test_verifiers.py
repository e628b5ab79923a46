"""What every verifier guarantees, on each kind. A new one is one line in CASES."""

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
from rollflow.tasks.verifiers import build_verifier
from rollflow.tasks.verifiers.base import Score, Verifier, judge
from rollflow.tasks.verifiers.config import ExactReward, ImportReward, ReasoningGymReward, RewardConfig
from rollflow.tasks.verifiers.pool import RewardPool, ScoreRequest
from tests.support.own_parts import FOLDER, put_in_reach
from tests.support.waiting import HANG_SECONDS


@dataclass(frozen=True)
class Case:
    """A verifier, the reference of one question, and an answer that is right."""

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


def test_the_right_answer_has_the_whole_reward_and_a_wrong_one_has_less(case: Case, verify: Verifier) -> None:
    assert verify(case.right, case.reference).reward == 1.0
    assert verify("1000001", case.reference).reward < 1.0


def test_a_score_is_a_finite_number_with_a_reason(case: Case, verify: Verifier) -> None:
    for response in (case.right, *ODD):
        score = verify(response, case.reference)
        assert math.isfinite(score.reward), response
        assert 0.0 <= score.reward <= 1.0, response
        assert score.reason, response


def test_the_same_response_gets_the_same_score_whatever_was_judged_before(case: Case, verify: Verifier) -> None:
    first = [verify(response, case.reference) for response in (case.right, *ODD)]
    assert [verify(response, case.reference) for response in (*ODD[::-1], case.right)] == first[::-1]
    assert [build_verifier(case.config)(response, case.reference) for response in (case.right, *ODD)] == first


def test_the_reference_stays_as_it_was(case: Case, verify: Verifier) -> None:
    before = copy.deepcopy(dict(case.reference))
    for response in (case.right, *ODD):
        verify(response, case.reference)
    assert case.reference == before


def test_what_it_raises_is_a_reason(case: Case, verify: Verifier) -> None:
    score = judge(verify, "all", case.right, {"family": "no such family"})
    assert score.reward == 0.0
    assert score.reason.startswith("verifier failed: ")


async def test_a_worker_process_says_the_same(case: Case, verify: Verifier, folder: Path) -> None:
    tokenizer, pool = Tokenizer.from_file(str(folder / "tokenizer.json")), RewardPool(case.config, folder)
    await pool.start()
    try:
        tokens = [tokenizer.encode(text).ids for text in (case.right, "1000001", "")]
        requests = [ScoreRequest(one, case.reference) for one in tokens]
        found = await asyncio.wait_for(pool.score(requests), HANG_SECONDS)
    finally:
        await pool.close()
    expected = [judge(verify, "all", tokenizer.decode(one), case.reference) for one in tokens]
    assert [(s.reward, s.reason) for s in found] == [(s.reward, s.reason) for s in expected]
    assert found[0].reward == 1.0


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        (Score(1, "one", 3.0), Score(1.0, "one")),
        (Score(0.5, "x" * 100_000), Score(0.5, "x" * 1000)),
        (Score(0.5, "half \ud83d"), Score(0.5, r"half \ud83d")),
        (Score(0.5, None), Score(0.5, "None")),  # type: ignore[arg-type]
        (Score(math.inf, "much"), Score(0.0, "verifier failed: ValueError: its reward is inf")),
        (Score("1", "text"), Score(0.0, "verifier failed: TypeError: must be real number, not str")),  # type: ignore[arg-type]
        (1.0, Score(0.0, "verifier failed: AttributeError: 'float' object has no attribute 'reward'")),
    ],
)
def test_whatever_is_given_as_a_score_can_be_stored(score: Score, kept: Score) -> None:
    assert replace(judge(lambda _, __: score, "all", "", {}), seconds=0.0) == kept
    kept.reason.encode()
