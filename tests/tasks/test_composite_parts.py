"""Tests of composite rewards with a judge or a reward model as a part: steps, sums, versions, actors and refusals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollflow.flows.config import parse_config
from rollflow.flows.keepalive.placement import needed_cpus
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.actors.reward_models import model_names
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import explain_fixed
from rollflow.tasks.run.limits import build_limits
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.run.reward_models import list_models
from rollflow.tasks.run.scorer_trial import _list_tried
from rollflow.tasks.scorers import build_scorer, build_scorers, build_verifier
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.composite import CompositeScorer
from rollflow.tasks.scorers.config import CodeReward, CompositeReward, list_remote
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.model.copies import Grade, ModelCopies
from rollflow.tasks.scorers.model.inputs import Conversation
from rollflow.tasks.scorers.version import compute_version
from tests.support.judge_server import Body, JudgeServer, Reply, judge_server, verdict
from tests.support.waiting import HANG_SECONDS

MATHS = {"weight": 0.8, "scorer": {"kind": "maths"}}
JUDGE = {"kind": "judge", "url": "http://127.0.0.1:8000/v1", "model": "m"}
MODEL = {"kind": "model", "path": "./taste"}
MIXED = {"kind": "composite", "parts": {"answer": MATHS, "style": {"weight": 0.2, "scorer": JUDGE}}}
UNJUDGED = Score(0.0, "away", Outcome.UNJUDGED)
FAILED = Score(0.0, "broke", Outcome.UNPARSABLE, failed=True)
RIGHT, WRONG = Score(1.0, "right"), Score(0.0, "wrong")


def composite(**keys: Any) -> CompositeReward:
    return CompositeReward.model_validate({"kind": "composite", **keys})


class FixedScorer(Scorer):
    """Gives every response the same score, and records the requests."""

    def __init__(self, score: Score | Exception) -> None:
        self._score = score
        self.asked = list[ScoreRequest]()
        self.is_open = False
        self.usage = ScorerUsage()

    async def start(self) -> None:
        self.is_open = True

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        futures: list[asyncio.Future[Score]] = [asyncio.get_running_loop().create_future() for _ in requests]
        for future in futures:
            if isinstance(self._score, Score):
                future.set_result(self._score)
            else:
                future.set_exception(self._score)
        self.asked += requests
        return futures

    async def close(self) -> None:
        self.is_open = False


async def score_steps(config: CompositeReward, **scores: Score | Exception) -> tuple[Score, list[str]]:
    """Score one response with parts that give these scores; return its score, and the names of the parts that were
    called.
    """
    parts = {name: FixedScorer(score) for name, score in scores.items()}
    scorer = CompositeScorer(config, parts, lambda tokens, special: "the text")
    await scorer.start()
    [found] = await scorer.score([ScoreRequest([1, 2, 3], {})])
    await scorer.close()
    assert not any(part.is_open for part in parts.values())
    return found, [name for name, part in parts.items() if part.asked]


async def test_value_is_the_weighted_sum_with_penalties() -> None:
    config = composite(
        parts=MIXED["parts"],
        format={"pattern": "x", "penalty": 0.25},
        length_penalty={"start": 1, "full": 5, "penalty": 0.5},
    )
    rubric = Score(0.5, "fair", parts={"sound": 1.0})
    found, asked = await score_steps(config, style=rubric, answer=RIGHT)
    assert found.value == pytest.approx(0.8 + 0.1 - 0.25 - 0.25)
    kept = {"answer": 1.0, "style": 0.5, "style.sound": 1.0}
    assert found.parts == {**kept, "format": -0.25, "length_penalty": -0.25}
    assert found.reason.endswith("answer: right; style: fair")
    assert (found.outcome, sorted(asked)) == (Outcome.PARTIAL, ["answer", "style"])


GATED = {"parts": {"style": {"scorer": JUDGE}, "answer": MATHS, "minus": {"weight": -0.5, "scorer": {"kind": "regex"}}}}


@pytest.mark.parametrize(
    ("answer", "value", "outcome"),
    [(WRONG, 0.0, Outcome.WRONG), (UNJUDGED, 0.0, Outcome.UNJUDGED), (FAILED, -0.5, Outcome.UNPARSABLE)],
)
async def test_no_further_part_is_called_once_the_score_is_decided(
    answer: Score, value: float, outcome: Outcome
) -> None:
    """The score is decided by a required part that is not correct, by an unjudged part, and by a failed part."""
    config = composite(**GATED, requires=["answer", "style"])
    found, asked = await score_steps(config, style=RIGHT, answer=answer, minus=WRONG)
    assert (found.value, found.outcome) == (value, outcome)
    assert asked == ["answer", "minus"]
    assert "style" not in found.parts


@pytest.mark.parametrize("name", ["style", "taste"])
async def test_unjudged_part_of_a_composite_leaves_it_unjudged(name: str) -> None:
    config = composite(parts={**MIXED["parts"], "taste": {"scorer": MODEL}})
    scores = {"answer": RIGHT, "style": RIGHT, "taste": RIGHT, name: UNJUDGED}
    found, _ = await score_steps(config, **scores)
    assert (found.value, found.outcome) == (0.0, Outcome.UNJUDGED)
    assert f"{name}: away" in found.reason


async def test_required_judge_is_asked_before_a_reward_model() -> None:
    parts = {"taste": {"scorer": MODEL}, "style": {"scorer": JUDGE}}
    found, asked = await score_steps(composite(parts=parts, requires=["style"]), taste=RIGHT, style=WRONG)
    assert (found.value, asked) == (0.0, ["style"])
    found, asked = await score_steps(composite(parts=parts, requires=["style"]), taste=RIGHT, style=RIGHT)
    assert (found.value, found.outcome, asked) == (2.0, Outcome.CORRECT, ["taste", "style"])


async def test_failed_part_gives_the_lowest_value_so_far() -> None:
    """A reward model has no bounds, so neither 0 nor the sum of the negative weights is the lowest value."""
    parts = {"taste": {"scorer": MODEL}, "minus": {"weight": -0.5, "scorer": MODEL}}
    answers = {"taste": FixedScorer(Score(-7.0)), "minus": FixedScorer(Score(3.0))}
    scorer = CompositeScorer(composite(parts=parts), answers, lambda tokens, special: "")
    request = ScoreRequest([1], {})
    values = []
    for name, score in (("taste", FAILED), ("taste", Score(-7.0)), ("minus", FAILED), ("taste", Score(2.0))):
        answers[name]._score = score
        values.append((await scorer.score([request]))[0].value)
        answers["minus"]._score = Score(3.0)
    assert values == [-0.5, -8.5, -8.5, 0.5]


async def test_sum_that_cannot_be_stored_gets_the_lowest_value() -> None:
    parts = {"taste": {"weight": -1e6, "scorer": MODEL}, "answer": MATHS}
    found, _ = await score_steps(composite(parts=parts), taste=Score(1e38), answer=RIGHT)
    assert (found.value, found.outcome) == (-1e6, Outcome.UNPARSABLE)


async def test_composite_part_that_scores_nothing_fails_the_run() -> None:
    with pytest.raises(ConfigError, match="no worker"):
        await score_steps(composite(parts=MIXED["parts"]), answer=ConfigError("no worker"), style=RIGHT)


# --- with real workers and a judge's server ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    for name, data in build_cold_folder(ColdStart(), ["1 + 1 = 2"] * 10).items():
        (path / name).write_bytes(data)
    return path


class LengthCopies(ModelCopies):
    """Grades a response by its length."""

    async def start(self) -> None:
        pass

    async def wait_ready(self, number: int) -> None:
        pass

    async def grade(self, number: int, conversations: Sequence[Conversation]) -> list[Grade]:
        return [Grade(float(len(response))) for _, response in conversations]


def build_requests(folder: Path, *texts: str, **reference: Any) -> list[ScoreRequest]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [ScoreRequest(tokenizer.encode(text).ids, reference) for text in texts]


async def score_all(scorer: Scorer, requests: Sequence[ScoreRequest]) -> list[Score]:
    await scorer.start()
    try:
        return await asyncio.wait_for(scorer.score(requests), 2 * HANG_SECONDS)
    finally:
        await scorer.close()


def judge_of(server: JudgeServer, **keys: Any) -> dict[str, Any]:
    return {**JUDGE, "url": server.url, "call_seconds": HANG_SECONDS, **keys}


@pytest.mark.long
async def test_judge_is_asked_only_about_right_answers(folder: Path) -> None:
    with judge_server(lambda *_: verdict(score=5)) as server:
        parts = {
            "answer": {"weight": 0.8, "scorer": {"kind": "maths"}},
            "style": {"weight": 0.2, "scorer": judge_of(server)},
            "length": {"weight": 0.125, "scorer": MODEL},
            "own": {"weight": -1.0, "scorer": {"kind": "regex", "pattern": "never"}},
        }
        config = composite(parts=parts, requires=["answer"])
        scorer = build_scorers({"": config}, folder, lambda section: LengthCopies())
        found = await score_all(scorer, build_requests(folder, "42", "41", r"\boxed{42}", answer="42"))
    assert [score.value for score in found] == pytest.approx([0.8 + 0.1 + 0.25, 0.0, 0.8 + 0.1 + 1.25])
    assert found[0].parts == {"answer": 1.0, "style": 0.5, "length": 2.0, "own": 0.0}
    assert found[1].parts == {"answer": 0.0, "own": 0.0}
    assert len(server.bodies) == 2
    assert {score.version for score in found} == {compute_version(config)}


@pytest.mark.long
async def test_response_after_the_deadline_gets_the_lowest_value(folder: Path) -> None:
    """A response that exceeds the worker's deadline does not escape a negative weight, and the judge is not called."""
    with judge_server(lambda *_: verdict(score=5)) as server:
        hangs = {"kind": "import", "path": "tests.support.scoring_functions:one"}
        parts = {"own": {"weight": -1.0, "scorer": hangs}, "style": {"scorer": judge_of(server)}}
        scorer = build_scorer(composite(parts=parts, deadline_seconds=2.0), folder)
        [found] = await score_all(scorer, build_requests(folder, "1", sleep=600))
    assert (found.value, found.outcome, server.bodies) == (-1.0, Outcome.TIMEOUT, [])


def prefer_longer(_: int, body: Body) -> Reply:
    first, second = (len(one) for one in re.findall(r"\]\n(.*)\n\[END", body["messages"][-1]["content"]))
    return verdict(winner="tie" if first == second else "first" if first > second else "second")


async def test_pairwise_part_compares_all_responses_of_a_prompt(folder: Path) -> None:
    with judge_server(prefer_longer) as server:
        judge = judge_of(server, mode="pairwise", special_tokens=True)
        config = composite(parts={"style": {"weight": 2.0, "scorer": judge}})
        texts = [one.tokens for one in build_requests(folder, "1", "1 1", "1 1 1")]
        requests = [ScoreRequest(own, {}, peers=[one for one in texts if one is not own]) for own in texts]
        found = await score_all(build_scorer(config, folder), requests)
    assert [score.value for score in found] == [0.0, 1.0, 2.0]
    assert config.compares_group
    assert build_limits(run_of(config.model_dump())).judging_of("").compares_group


def run_of(reward: dict[str, Any]) -> RunConfig:
    return parse_config({"policy": {"path": "p"}, "engine": {"kind": "timed"}, "reward": reward})


async def test_part_of_a_judge_has_its_own_section_and_usage(folder: Path) -> None:
    with judge_server(lambda *_: Reply("no", 404)) as server:
        config = composite(parts={"style": {"scorer": judge_of(server)}})
        scorer = build_scorer(config, folder, "rewards.r")
        await scorer.start()
        serving = asyncio.create_task(scorer.serve(asyncio.Event()))
        [future] = scorer.submit(build_requests(folder, "1"))
        for ended in (serving, future):
            with pytest.raises(ConfigError, match=r"^rewards\.r\.parts\.style\.scorer\.model = 'm'"):
                await asyncio.wait_for(ended, HANG_SECONDS)
        await scorer.close()


# --- the config, and other code that must know the parts --------------------------------------------------------------

TASTE = {"kind": "composite", "parts": {"answer": MATHS, "taste": {"scorer": {**MODEL, "workers": 2, "cpus": 3}}}}


def test_each_reward_model_of_a_part_has_its_own_actors() -> None:
    tree = {"reward": TASTE, "rewards": {"r": TASTE, "taste": MODEL, "scorer": MODEL}}
    sources = [{"kind": "sorting"}, *({"kind": "sorting", "reward": name} for name in ("r", "taste", "scorer"))]
    config = parse_config({"policy": {"path": "p"}, "engine": {"kind": "timed"}, "prompts": sources, **tree})
    section = "parts.taste.scorer"
    assert [*list_models(config)] == [f"reward.{section}", f"rewards.r.{section}", "rewards.taste", "rewards.scorer"]
    assert model_names(config) == {
        "reward-model-parts.taste-0": (f"reward.{section}", 0),
        "reward-model-parts.taste-1": (f"reward.{section}", 1),
        "reward-model-r.parts.taste-0": (f"rewards.r.{section}", 0),
        "reward-model-r.parts.taste-1": (f"rewards.r.{section}", 1),
        "reward-model-taste-0": ("rewards.taste", 0),
        "reward-model-scorer-0": ("rewards.scorer", 0),
    }


def test_composite_reward_reserves_the_cpus_of_its_parts() -> None:
    plain, mixed = run_of({"kind": "exact"}), run_of({**TASTE, "workers": 2})
    assert (mixed.scorer_workers, mixed.reward.scoring_slots) == (2, 4)
    assert needed_cpus(mixed) - needed_cpus(plain) == pytest.approx(2 - 1 + 2 * 3)


def test_shared_keys_of_a_composite_reward_apply_to_its_parts() -> None:
    code = {"scorer": {"kind": "code"}}
    keys = {"workers": 3, "at_once": 7, "deadline_seconds": 9.0, "special_tokens": False, "judge_tries": 5}
    config = composite(parts={**MIXED["parts"], "code": code}, format={"pattern": "x"}, **keys)
    scorers = config.part_scorers
    for name, value in keys.items():
        assert getattr(scorers["code"], name) == value
    assert isinstance(scorers["code"], CodeReward)
    assert isinstance(scorers["style"], JudgeReward)
    assert (scorers["style"].at_once, scorers["style"].deadline_seconds) == (32, 300.0)
    assert not scorers["style"].special_tokens
    assert not any(scorer.format for scorer in scorers.values())


@pytest.mark.parametrize(
    ("reward", "sentence"),
    [
        ({**MIXED, "judge_tries": 0}, r"^reward\.judge_tries = 0: a part is a judge or a reward model"),
        (
            {"kind": "composite", "parts": {"j": {"scorer": {**JUDGE, "format": {"pattern": "x"}}}}},
            r"^reward\.parts\.j\.scorer\.format = .*set format of the composite reward",
        ),
        (
            {"kind": "composite", "parts": {"j": {"scorer": {**JUDGE, "lowest": 9, "highest": 3}}}},
            r"^reward\.parts\.j\.scorer\.highest = 3: the highest score must be above reward\.parts\.j",
        ),
    ],
)
def test_invalid_judge_in_a_composite_part_is_refused(reward: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        run_of(reward)


def test_answer_key_of_a_composite_applies_to_all_parts() -> None:
    config = composite(parts={**MIXED["parts"], "taste": {"scorer": MODEL}}, answer="tag")
    assert {part.answer for part in config.part_scorers.values()} == {"tag"}
    assert {part.answer for part in composite(parts=MIXED["parts"]).part_scorers.values()} == {"all"}


def test_judge_in_a_composite_reward_keeps_its_own_limits() -> None:
    judge = {**JUDGE, "at_once": 3, "deadline_seconds": 7.0, "budget_tokens": 100}
    config = run_of({"kind": "composite", "parts": {"j": {"scorer": judge}}})
    assert list_remote(config.scorers)["reward.parts.j.scorer"].deadline_seconds == 7.0


@pytest.mark.parametrize("scorer", [JUDGE, MODEL])
def test_cold_start_refuses_a_part_without_reference_answers(scorer: dict[str, Any]) -> None:
    reward = {"kind": "composite", "parts": {"p": {"scorer": scorer}}}
    where = rf"^reward\.parts\.p\.scorer\.kind = '{scorer['kind']}': a cold start compares its responses with answers"
    with pytest.raises(ConfigError, match=where):
        parse_config({"reward": reward})


def test_keys_without_effect_on_scores_keep_the_scorer_version() -> None:
    def version(**keys: Any) -> str:
        return compute_version(composite(parts={"answer": MATHS, "j": {"scorer": {**JUDGE, **keys}}}))

    operations = {"budget_tokens": 5, "tries": 1, "at_once": 2, "tokens_per_minute": 9, "call_seconds": 3}
    assert version(**operations) == version()
    assert version(lowest=-3) != version()
    assert version(model="other") != version()


def test_only_operational_keys_of_a_judge_may_change() -> None:
    config = run_of(MIXED)
    at = "reward.parts.style.scorer"
    for key in ("budget_tokens", "tries", "at_once", "url", "deadline_seconds"):
        assert not explain_fixed(config, f"{at}.{key}"), key
    for key in ("reward.parts.style.weight", "reward.parts.other", at, f"{at}.kind", f"{at}.rubric.sound.weight"):
        assert explain_fixed(config, key), key
    assert explain_fixed(config, "reward.parts.answer.scorer.decimals")


def test_error_for_a_row_without_a_rubric_names_the_part(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "q", "answer": "1"}\n')
    source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "held_out": 0}
    reward = {"kind": "composite", "parts": {"j": {"scorer": {**JUDGE, "mode": "rubric"}}}}
    config = parse_config({"policy": {"path": "p"}, "prompts": [source], "reward": reward})
    with pytest.raises(ConfigError, match=r"line 1: .*rubric.*reward\.parts\.j\.scorer\.kind = "):
        read_files(config, read_file)


def test_scorer_trial_does_not_call_a_judge() -> None:
    own = {"scorer": {"kind": "import", "path": "tests.support.scoring_functions:one"}}
    config = composite(parts={**MIXED["parts"], "own": own}, deadline_seconds=7.0)
    [(section, tried)] = _list_tried("r", config)
    assert (section, tried.kind, tried.deadline_seconds) == ("rewards.r.parts.own.scorer", "import", 7.0)


def test_composite_with_a_judge_cannot_be_a_verifier() -> None:
    with pytest.raises(
        ConfigError, match=r"^reward\.kind = 'composite': one of its parts is a judge or a reward model"
    ):
        build_verifier(composite(parts=MIXED["parts"]))
