"""Tests the guarantees of scorers and verifiers on each kind. To test a new verifier, add a line to CASES."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reasoning_gym
from tokenizers import Tokenizer

from rollflow.storage.records import Outcome
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.sandboxes.config import UnsafeProcessSandbox
from rollflow.tasks.scorers import build_scorer, build_verifier
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest
from rollflow.tasks.scorers.base_config import Format
from rollflow.tasks.scorers.config import (
    ChoiceReward,
    CodeReward,
    CompositePart,
    CompositeReward,
    ExactReward,
    ImportReward,
    InstructionsReward,
    MathsReward,
    ReasoningGymReward,
    RegexReward,
    RewardConfig,
)
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.verifier import Verifier, score_response
from rollflow.testing.scorers import ODD, ScorerCase, ScorerContract
from tests.support.judge_server import Body, Reply, judge_server, verdict
from tests.support.reward_models import make_reward_model
from tests.support.scoring_functions import PARTS
from tests.support.user_code import FOLDER, put_in_reach
from tests.support.waiting import HANG_SECONDS

SUM = reasoning_gym.create_dataset("chain_sum", seed=3, size=1)[0]
FAMILY = {"family": "chain_sum", "answer": SUM["answer"], "metadata": SUM["metadata"]}
SEED = 11  # with this seed, the model with random weights scores the right answer as good and the wrong answer as bad
CASES = {
    "reasoning-gym": ScorerCase(ReasoningGymReward(), FAMILY, SUM["answer"]),
    "exact": ScorerCase(ExactReward(), {"family": None, "answer": 17}),
    "import": ScorerCase(ImportReward(path="letters.rewards:near", options={"width": 2}), {"answer": "17"}),
    "code": ScorerCase(
        CodeReward(fenced=False, sandbox=UnsafeProcessSandbox()),
        {"cases": [{"stdin": "", "stdout": "17"}]},
        right="print(17)",
        wrong="print(1)",
    ),
    "maths": ScorerCase(MathsReward(), {"answer": "17"}),
    "choice": ScorerCase(ChoiceReward(), {"answer": "B", "options": ["16", "17", "18"]}, wrong="18"),
    "regex": ScorerCase(RegexReward(pattern=r"(?P<number>\d+)", group="number"), {"answer": "17"}),
    "instructions": ScorerCase(
        InstructionsReward(),
        {"instruction_id_list": ["keywords:existence", "punctuation:no_comma"], "kwargs": [{"keywords": ["17"]}, {}]},
        wrong="1, 2",
    ),
    "composite": ScorerCase(
        CompositeReward(parts={"maths": CompositePart(scorer=MathsReward()), "text": CompositePart(weight=0.0)}),
        {"answer": "17"},
    ),
    "composite of user code": ScorerCase(
        CompositeReward(
            parts={
                "one": CompositePart(scorer=ImportReward(path="tests.support.scoring_functions:number")),
                "b": CompositePart(weight=0.0),
            }
        ),
        {"answer": "17"},
    ),
    # The folder is in `model_folder`. In batches of one response, the scores are the same bit for bit in each run.
    "model": ScorerCase(ModelReward(path="./taste", label="good", correct_from=0.5, max_batch=1), {"question": ""}),
    "number": ScorerCase(ImportReward(path="tests.support.scoring_functions:number"), {"answer": "17"}),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_reward_model(folder / "taste", labels=("bad", "good"), seed=SEED)
    return folder


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ScorerCase:
    put_in_reach(monkeypatch, FOLDER)
    found: ScorerCase = request.param
    if isinstance(found.config, ModelReward):
        monkeypatch.chdir(request.getfixturevalue("model_folder"))
    return found


@pytest.fixture
def verify(case: ScorerCase) -> Verifier:
    return build_verifier(case.config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["1 + 1 = 2"] * 10).items():
        (path / name).write_bytes(data)
    return path


def test_every_scorer_kind_has_a_test_case() -> None:
    kinds = RewardConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(case.config) for case in CASES.values()} | {JudgeReward} == set(kinds)


class TestVerifiers(ScorerContract):
    """The scorer contract, tested on each verifier."""

    @pytest.fixture
    def case(self, case: ScorerCase) -> ScorerCase:
        return case

    def test_scores_of_a_proportional_verifier_are_in_0_to_1(self, case: ScorerCase, verify: Verifier) -> None:
        assert all(0.0 <= score.value <= 1.0 for score in self.score(verify, case, case.right, case.wrong, *ODD))


def grade(_: int, body: Body) -> Reply:
    """Answer as a judge that finds only the response 17 right."""
    return verdict(score=10 * ("]\n17\n[" in body["messages"][-1]["content"]))


class TestJudge(ScorerContract):
    """The scorer contract, tested on a judge behind an endpoint."""

    @pytest.fixture
    def case(self) -> Iterator[ScorerCase]:
        with judge_server(grade) as server:
            yield ScorerCase(JudgeReward(url=server.url, model="judge"), {"question": "8 + 9"})

    @pytest.fixture
    def verify(self, case: ScorerCase, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Verifier:
        """Score texts as the scorer does. Each event loop has its own scorer."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        scorers: dict[asyncio.AbstractEventLoop, asyncio.Task[Scorer]] = {}

        async def start() -> Scorer:
            scorer = build_scorer(case.config, folder)
            await scorer.start()
            return scorer

        async def score(response: str, reference: Mapping[str, Any]) -> Score:
            loop = asyncio.get_running_loop()
            scorer = await scorers.setdefault(loop, scorers.get(loop) or loop.create_task(start()))
            [found] = await scorer.score([ScoreRequest(tokenizer.encode(response).ids, reference)])
            return found

        verifier = Verifier(score, is_async=True)
        monkeypatch.setattr("rollflow.testing.scorers.build_verifier", lambda _: verifier)
        return verifier


def test_verifier_error_becomes_the_reason(case: ScorerCase, verify: Verifier) -> None:
    score = score_response(verify, "all", case.right, {"family": "no such family"})
    assert score.value == 0.0
    assert " failed: " in score.reason


@pytest.mark.parametrize(
    ("value", "outcome"),
    [(1.0, "correct"), (2.0, "correct"), (0.999, "partial"), (0.0, "wrong"), (-1.0, "wrong")],
)
def test_missing_outcome_follows_from_the_value(value: float, outcome: str) -> None:
    assert Score(value).outcome == outcome
    assert Score(value, outcome=Outcome.UNPARSABLE).outcome is Outcome.UNPARSABLE


FORMS = ("one", "later", "several", "several_later")


@pytest.fixture
def pool(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Scorer]:
    put_in_reach(monkeypatch, FOLDER)

    def build(name: str, **keys: Any) -> Scorer:
        path = f"tests.support.scoring_functions:{name}"
        return build_scorer(ImportReward(path=path, **{"deadline_seconds": HANG_SECONDS, **keys}), folder)

    return build


async def score_all(scorer: Scorer, references: Sequence[Mapping[str, Any]]) -> list[Score]:
    await scorer.start()
    try:
        found = scorer.score([ScoreRequest([5], reference) for reference in references])
        return [replace(score, seconds=0.0) for score in await asyncio.wait_for(found, 4 * HANG_SECONDS)]
    finally:
        await scorer.close()


CLOSE = Score(0.75, "close", Outcome.PARTIAL, PARTS)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name if name in ("one", "several_later") else pytest.param(name, marks=pytest.mark.soak) for name in FORMS]
)
async def test_every_response_gets_an_outcome(pool: Callable[..., Scorer], name: str) -> None:
    """A response that causes an error changes no other score, whatever the signature of the scorer function is."""
    scorer = pool(name, deadline_seconds=3.0)
    faults = ({"raises": True}, {"sleep": 60}, {"dies": True}, {"answer": {1}})
    references = [{}, {}, *faults, {}]
    found = await score_all(scorer, references)
    assert found == [
        *(CLOSE, CLOSE),
        failure("LookupError: no such answer"),
        Score(0.0, "deadline: no verdict in 3 s", Outcome.TIMEOUT),
        Score(0.0, "the reward worker died twice on this response", Outcome.KILLED),
        Score(0.0, "request failed: TypeError: Object of type set is not JSON serializable", Outcome.UNPARSABLE),
        CLOSE,
    ]
    assert (scorer.usage.scored, scorer.usage.timeouts) == (len(references) - 1, 1)
    assert scorer.usage.busy_seconds > 0


@pytest.mark.long
@pytest.mark.parametrize("name", FORMS)
async def test_format_penalty_applies_to_every_return_type(pool: Callable[..., Scorer], name: str) -> None:
    [found] = await score_all(pool(name, format={"pattern": "x", "penalty": 0.5}), [{}])
    assert found == Score(0.25, "not in its form; close", Outcome.PARTIAL, {**PARTS, "format": -0.5})


@pytest.mark.long
async def test_exit_in_an_asyncio_task_kills_the_scorer_worker(pool: Callable[..., Scorer]) -> None:
    """The worker process ends at once, without waiting for more input or for the deadline."""
    [fine, exited, cancelled] = await score_all(pool("later"), [{}, {"exits": True}, {"cancels": True}])
    assert fine == CLOSE
    assert exited == Score(0.0, "the reward worker died twice on this response", Outcome.KILLED)
    assert cancelled.outcome is Outcome.UNPARSABLE
    assert "CancelledError" in cancelled.reason


@pytest.mark.long
async def test_asynchronous_scorer_scores_many_responses_at_once(pool: Callable[..., Scorer]) -> None:
    """No response gets its score until eight responses are being scored. More responses arrive meanwhile."""
    found = await score_all(pool("meet", at_once=8), [{"of": 8}] * 20)
    assert found == [Score(1.0)] * 20


@pytest.mark.long
async def test_scorer_call_has_no_more_responses_than_at_once(pool: Callable[..., Scorer]) -> None:
    """If a call fails, for example because a score is missing, each response is scored alone."""
    found = await score_all(pool("count", at_once=16), [{}] * 40)
    assert [score.value for score in found] == [0.16] * 32 + [0.08] * 8
    found = await score_all(pool("count", at_once=20), [{}] * 20)
    assert [score.value for score in found] == [0.01] * 20


@pytest.mark.long
async def test_scorer_serves_until_its_run_is_finished(pool: Callable[..., Scorer]) -> None:
    scorer, finished = pool("later"), asyncio.Event()
    await scorer.start()
    serving = asyncio.create_task(scorer.serve(finished))
    assert [score.outcome for score in await scorer.score([ScoreRequest([5], {})])] == ["partial"]
    assert not serving.done()
    finished.set()
    await asyncio.wait_for(serving, HANG_SECONDS)


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
def test_response_in_a_wrong_form_gets_the_format_penalty(pattern: str | None, response: str, reward: float) -> None:
    form = Format(penalty=0.25) if pattern is None else Format(penalty=0.25, pattern=pattern)
    score = score_response(build_verifier(ExactReward()), "tag", response, {"answer": 17}, form)
    assert score.value == reward == sum(score.parts.values())
    assert (score.outcome is Outcome.CORRECT) == (reward == 1.0)
    assert score.reason.startswith("not in its form; ") == (reward in (0.75, -0.25))


def test_reason_names_both_wrong_form_and_verifier_error() -> None:
    score = score_response(
        build_verifier(ReasoningGymReward()), "tag", "17", {"family": "no such family"}, Format(penalty=0.25)
    )
    assert score.value == -0.25
    assert score.reason.startswith("not in its form; verifier failed: ")


def test_format_penalty_is_the_same_with_every_verifier(case: ScorerCase, verify: Verifier) -> None:
    """The expected score comes from a search for the tags in the text. The penalty is subtracted from the score of the
    answer without tags.
    """
    for answer in (case.right, *ODD):
        for response in (answer, f"<answer>{answer}</answer>", f"</answer>{answer}<answer>"):
            plain = score_response(verify, "tag", response, case.reference)
            found = score_response(verify, "tag", response, case.reference, Format(penalty=0.5))
            opened = response.find("<answer>")
            tagged = opened >= 0 and response.find("</answer>", opened) >= 0
            assert found.value == plain.value - (0.0 if tagged else 0.5), response
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
    assert [score.value for score in found] == [1.0, -0.5, -0.5]


def failure(reason: str) -> Score:
    return Score(0.0, f"verifier failed: {reason}", Outcome.UNPARSABLE)


@pytest.mark.parametrize(
    ("score", "kept"),
    [
        (Score(1, "one", seconds=3.0), Score(1.0, "one")),
        (Score(0.5, "x" * 100_000), Score(0.5, "x" * 1000)),
        (Score(0.5, "half \ud83d"), Score(0.5, r"half \ud83d")),
        (Score(0.5, None), Score(0.5, "None")),  # type: ignore[arg-type]
        (
            Score(math.inf, "much"),
            failure("ValueError: the score's value is inf, which is not a finite float32 number"),
        ),
        (
            Score(-1e39, "more than a float32"),
            failure("ValueError: the score's value is -1e+39, which is not a finite float32 number"),
        ),
        (Score(3e38, "as much as one"), Score(3e38, "as much as one")),
        (Score("1", "text"), failure("TypeError: the score's value must be a number, not a str")),  # type: ignore[arg-type]
        (1, Score(1.0)),
        (True, Score(1.0)),
        (np.float32(0.5), Score(0.5)),
        ("good", failure("TypeError: the scorer must return a Score or a number, not a str")),
        (None, failure("TypeError: the scorer must return a Score or a number, not a NoneType")),
        (Score(1.0, "", "partial"), Score(1.0, "", Outcome.PARTIAL)),  # type: ignore[arg-type]
        (Score(1.0, "", "good"), failure("ValueError: 'good' is not a valid Outcome")),  # type: ignore[arg-type]
        (Score(0.5, parts={"a": 1, "b\ud83d": 2.0}), Score(0.5, parts={"a": 1.0, r"b\ud83d": 2.0})),
        (
            Score(0.5, parts={"a": math.nan}),
            failure("ValueError: the score's part 'a' is nan, which is not a finite float32 number"),
        ),
        (Score(0.5, parts={"a": None}), failure("TypeError: the score's part 'a' must be a number, not a NoneType")),  # type: ignore[dict-item]
        (
            Score(0.5, parts={str(number): 1.0 for number in range(65)}),
            failure("ValueError: the score has 65 parts, more than the 64 that are allowed"),
        ),
    ],
)
def test_any_returned_score_can_be_stored(score: Score, kept: Score) -> None:
    assert replace(score_response(lambda _, __: score, "all", "", {}), seconds=0.0) == kept
    kept.reason.encode()
