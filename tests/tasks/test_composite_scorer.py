"""Tests of the verifier `composite` against hand calculations: sums, required parts and failures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.run.user_code import check_own_parts, own_code
from rollflow.tasks.scorers import build_scorer, build_verifier
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.base_config import Format, LengthPenalty
from rollflow.tasks.scorers.composite import combine_scores
from rollflow.tasks.scorers.concurrent import ConcurrentPool
from rollflow.tasks.scorers.config import CompositeReward, ExactReward, ImportReward
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.verifier import finish_score, score_response
from rollflow.tasks.scorers.worker_pool import ScoringJob, WorkerPool
from tests.support.user_code import FOLDER, put_in_reach
from tests.support.waiting import HANG_SECONDS

ANSWER = {"weight": 1.0, "scorer": {"kind": "maths"}}
SHORT = {"weight": 0.25, "scorer": {"kind": "regex", "pattern": ".{0,20}"}}
RULES = {"weight": -0.5, "scorer": {"kind": "instructions"}}
ROW = {"answer": "42", "instruction_id_list": ["punctuation:no_comma", "startend:quotation"], "kwargs": [{}, {}]}
FUNCTIONS = "tests.support.scoring_functions"


def part(name: str, **keys: Any) -> dict[str, Any]:
    return {"scorer": {"kind": "import", "path": f"{FUNCTIONS}:{name}"}, **keys}


def score(response: str, reference: dict[str, Any] = ROW, **keys: Any) -> Score:
    config = CompositeReward.model_validate(keys)
    return score_response(build_verifier(config), "all", response, reference, config.format)


@pytest.mark.parametrize(
    ("response", "value", "outcome"),
    [
        ("42", 1.0 + 0.25 - 0.25, "partial"),
        (r"It is, I think, \boxed{42}", 1.0, "partial"),
        ("41", 0.25 - 0.25, "partial"),
        ("I think, it is 41, or not", 0.0, "wrong"),
    ],
)
def test_composite_score_is_the_weighted_sum_of_its_parts(response: str, value: float, outcome: str) -> None:
    found = score(response, parts={"maths": ANSWER, "short": SHORT, "rules": RULES})
    assert (found.value, found.outcome) == (pytest.approx(value), outcome), found


def test_composite_score_keeps_its_parts_by_name() -> None:
    found = score("42", parts={"maths": ANSWER, "short": SHORT, "rules": RULES})
    inner = {"rules.punctuation:no_comma": 1.0, "rules.startend:quotation": 0.0}
    assert found.parts == {"maths": 1.0, "short": 1.0, "rules": 0.5, **inner}
    assert "maths: 42 equals 42" in found.reason


def test_score_is_zero_unless_the_required_part_is_correct() -> None:
    keys: dict[str, Any] = {"parts": {"maths": ANSWER, "short": SHORT}, "requires": ["maths"]}
    right, wrong, none = (score(response, **keys) for response in ("42", "41", r"\boxed{42"))
    assert (right.value, right.outcome) == (1.25, Outcome.CORRECT)
    assert (wrong.value, wrong.outcome, wrong.parts["short"]) == (0.0, Outcome.WRONG, 1.0)
    assert (none.value, none.outcome) == (0.0, Outcome.UNPARSABLE)
    assert wrong.reason.startswith("maths is not correct; ")


def test_format_penalty_is_subtracted_from_the_weighted_sum() -> None:
    found = score("42", parts={"maths": ANSWER, "short": SHORT}, format=Format(pattern="<.*>", penalty=0.5))
    assert found.value == 0.75
    assert found.parts == {"answer": 1.25, "maths": 1.0, "short": 1.0, "format": -0.5}


def test_each_part_of_a_composite_reads_its_own_text() -> None:
    tagged = {"scorer": {"kind": "exact", "answer": "tag"}}
    whole = {"weight": 0.5, "scorer": {"kind": "exact"}}
    assert score("so <answer>42</answer>", parts={"tag": tagged, "all": whole}).parts == {"tag": 1.0, "all": 0.0}


@pytest.mark.parametrize("name", ["one", "later", "several", "several_later"])
def test_every_form_of_user_scorer_can_be_a_part(name: str) -> None:
    found = score("42", parts={"own": part(name, weight=2.0), "maths": ANSWER})
    assert found.value == pytest.approx(2.0 * 0.75 + 1.0)
    assert found.parts == {"own": 0.75, "maths": 1.0, "own.answer": 0.5, "own.length": 0.25}
    assert found.outcome is Outcome.PARTIAL


@pytest.mark.parametrize("name", ["one", "later", "several", "several_later"])
def test_failure_of_a_reward_part_scores_zero(name: str) -> None:
    found = score("42", {**ROW, "raises": True}, parts={"maths": ANSWER, "own": part(name)})
    assert (found.value, found.outcome) == (0.0, Outcome.UNPARSABLE)
    assert found.reason == "own failed: LookupError: no such answer"


def test_failed_part_of_negative_weight_gets_the_lowest_score() -> None:
    """A response gets no higher score because a part fails or is late."""
    parts = {"maths": ANSWER, "own": part("one", weight=-1.0), "rules": RULES}
    found = score("42", {**ROW, "raises": True}, parts=parts)
    assert (found.value, found.outcome) == (-1.5, Outcome.UNPARSABLE)


def test_response_that_mentions_a_failure_is_scored_normally() -> None:
    parts = {"maths": ANSWER, "rules": RULES}
    found = score(r"\boxed{verifier failed: 41}", parts=parts)
    assert (found.value, found.outcome) == (-0.25, Outcome.PARTIAL)


def test_threshold_of_a_part_decides_if_the_part_is_correct() -> None:
    keys: dict[str, Any] = {"parts": {"own": part("one")}, "requires": ["own"]}
    assert score("42", **keys).value == 0.0
    keys["parts"]["own"]["scorer"]["correct_from"] = 0.75
    assert (score("42", **keys).value, score("42", **keys).outcome) == (0.75, Outcome.CORRECT)


@pytest.mark.parametrize("pool", [RewardPool, ConcurrentPool])
async def test_response_that_stops_its_scorer_gets_the_lowest_score(pool: type[WorkerPool], tmp_path: Path) -> None:
    """If the worker has ended, it is unknown whether the response has the required format."""
    keys = {"parts": {"maths": ANSWER, "rules": RULES}, "format": {"penalty": 0.125}}
    config = CompositeReward.model_validate(keys)
    more = [] if pool is RewardPool else [build_verifier(config)]
    created = pool(config, tmp_path, *more)  # type: ignore[arg-type]
    for settle, outcome in ((created._settle_late, Outcome.TIMEOUT), (created._settle_dead, Outcome.KILLED)):
        job = ScoringJob(0, b"", asyncio.get_running_loop().create_future())
        settle(job)
        assert (job.future.result().value, job.future.result().outcome) == (-0.625, outcome)


def test_unjudged_part_leaves_the_response_unjudged() -> None:
    config = CompositeReward.model_validate({"parts": {"maths": ANSWER, "own": part("one")}, "requires": ["maths"]})
    scores = {"maths": Score(0.0), "own": Score(0.0, "no connection", Outcome.UNJUDGED)}
    found = combine_scores(config, scores)
    assert (found.value, found.outcome) == (0.0, Outcome.UNJUDGED)
    assert found.reason.endswith("own: no connection")


WRONG_KEYS: list[tuple[dict[str, Any], str]] = [
    ({"answer": "tag", "parts": {"m": {"scorer": {"kind": "exact", "answer": "tag"}}}}, "parts.m.scorer.answer"),
    ({"parts": {}}, "at least 1 item"),
    ({"parts": {"format": ANSWER}}, "parts = 'format'"),
    ({"parts": {"a b": ANSWER}}, "parts = 'a b'"),
    ({"parts": {"maths": ANSWER}, "requires": ["code"]}, "requires = 'code'.*name one of maths"),
    ({"parts": {"m": {"scorer": {"kind": "maths", "workers": 2}}}}, "scorer.workers = 2.*set workers of the composite"),
    ({"parts": {"m": {"scorer": {"kind": "code", "at_once": 9}}}}, "scorer.at_once = 9.*set at_once of the composite"),
    ({"parts": {"m": {"scorer": {"kind": "maths", "judge_tries": 0}}}}, "scorer.judge_tries = 0.*set judge_tries of"),
    ({"parts": {"m": {"scorer": {"kind": "maths", "unjudged": "leave_out"}}}}, "scorer.unjudged = 'leave_out'"),
    (
        {"parts": {name: {"scorer": {"kind": "code", "adaptive": {}}} for name in ("a", "b")}},
        "parts = 'a, b': only one part of a composite reward may have adaptive",
    ),
    ({"parts": {"m": {"scorer": {"kind": "composite", "parts": {"m": ANSWER}}}}}, "composite"),
]


@pytest.mark.parametrize(("keys", "sentence"), WRONG_KEYS)
def test_invalid_composite_reward_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        CompositeReward.model_validate(keys)


def test_composite_reward_config_is_read_as_stored() -> None:
    config = CompositeReward.model_validate({"parts": {"maths": ANSWER, "code": {"scorer": {"kind": "code"}}}})
    assert CompositeReward.model_validate_json(config.model_dump_json()) == config
    assert build_verifier(config).is_async


def test_user_code_of_a_reward_part_is_hashed() -> None:
    config = RunConfig.model_validate({"reward": {"kind": "composite", "parts": {"own": part("one")}}})
    assert own_code(config).keys() == {"reward.parts.own.scorer"}


BAD_PART = {"kind": "regex", "pattern": "("}
JUDGE = {"kind": "judge", "url": "http://127.0.0.1:8000/v1", "model": "m"}
PLACED: list[tuple[dict[str, Any], str]] = [
    ({"reward": BAD_PART}, r"^reward\.pattern = '\('"),
    ({"rewards": {"r": BAD_PART}}, r"^rewards\.r\.pattern = '\('"),
    (
        {"reward": {"kind": "composite", "parts": {"p": {"scorer": BAD_PART}}}},
        r"^reward\.parts\.p\.scorer\.pattern = '\('",
    ),
    (
        {"rewards": {"r": {"kind": "composite", "parts": {"regex": {"scorer": BAD_PART}}}}},
        r"^rewards\.r\.parts\.regex\.scorer\.pattern = '\('",
    ),
    (
        {"reward": {"kind": "composite", "parts": {"p": {"scorer": {"kind": "maths", "workers": 2}}}}},
        r"^reward\.parts\.p\.scorer\.workers = 2",
    ),
    (
        {"rewards": {"r": {"kind": "composite", "parts": {"p": ANSWER}, "requires": ["q"]}}},
        r"^rewards\.r\.requires = 'q'",
    ),
    (
        {"rewards": {"r": {**JUDGE, "lowest": 5, "highest": 3}}},
        r"^rewards\.r\.highest = 3: the highest score must be above rewards\.r\.lowest = 5; raise rewards\.r\.highest",
    ),
    ({"rewards": {"r": {**JUDGE, "url": "ftp://x"}}}, r"^rewards\.r\.url = .* variable in rewards\.r\.token_env"),
    ({"rewards": {"r": {"kind": "exact", "format": {"pattern": "("}}}}, r"^rewards\.r\.format\.pattern = '\('"),
    (
        {"rewards": {"r": {"kind": "exact", "length_penalty": {"start": 9, "full": 9}}}},
        r"^rewards\.r\.length_penalty\.full = 9: the penalty rises from start = 9",
    ),
]


@pytest.mark.parametrize(("tree", "sentence"), PLACED)
def test_error_names_the_key_of_the_parts_own_section(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config(tree)


def test_error_for_a_missing_function_names_the_parts_key() -> None:
    tree = {"kind": "composite", "parts": {"own": {"scorer": {"kind": "import", "path": "nowhere.to:find"}}}}
    for key, config in (("reward", {"reward": tree}), ("rewards.r", {"rewards": {"r": tree}})):
        with pytest.raises(ConfigError, match=rf"^{key}\.parts\.own\.scorer\.path = 'nowhere.to:find'"):
            check_own_parts(parse_config(config))


@pytest.mark.parametrize(
    ("answer", "scorer", "key"),
    [("", {"kind": "maths"}, "kind"), ("a</answer>b", {"kind": "exact", "answer": "tag"}, "answer")],
)
def test_error_for_a_bad_row_names_the_key_of_the_part(
    tmp_path: Path, answer: str, scorer: dict[str, Any], key: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "q", "answer": answer}) + "\n")
    source = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "held_out": 0, "reward": "r"}
    reward = {"kind": "composite", "parts": {"part": {"scorer": scorer}}}
    config = parse_config({"prompts": [source], "rewards": {"r": reward}})
    with pytest.raises(ConfigError, match=rf"line 1: .*rewards\.r\.parts\.part\.scorer\.{key} = "):
        read_files(config, read_file)


# --- the penalty of a long response -----------------------------------------------------------------------------------

RISING: dict[str, Any] = {"start": 10, "full": 20, "penalty": 0.5}


@pytest.mark.parametrize(("length", "amount"), [(0, 0.0), (10, 0.0), (11, 0.05), (15, 0.25), (20, 0.5), (500, 0.5)])
def test_length_penalty_rises_linearly(length: int, amount: float) -> None:
    """DAPO's soft overlong punishment (Yu et al. 2025, eq. 13), with its maximum at `full`."""
    assert LengthPenalty(**RISING).amount(length) == pytest.approx(amount)


@pytest.mark.parametrize(("unit", "amount"), [("tokens", 0.25), ("characters", 0.1)])
def test_length_penalty_is_stored_beside_the_weighted_sum(unit: str, amount: float) -> None:
    keys = {"parts": {"maths": ANSWER, "short": SHORT}, "length_penalty": {"unit": unit, **RISING}}
    config = CompositeReward.model_validate(keys)
    response = "it is     42"
    score = score_response(build_verifier(config), "all", response, ROW)
    found = finish_score(score, config, response, 15)
    assert found.value == pytest.approx(1.25 - amount)
    assert found.parts == {"answer": 1.25, "maths": 1.0, "short": 1.0, "length_penalty": pytest.approx(-amount)}
    assert found.outcome is Outcome.CORRECT
    assert found.reason.startswith(f"{15 if unit == 'tokens' else 12} {unit} are too long; maths: ")
    assert finish_score(score, config, response, 5).value == 1.25 or unit == "characters"


def test_correctness_threshold_applies_after_all_penalties() -> None:
    keys = {"format": {"pattern": "x", "penalty": 0.25}, "length_penalty": RISING, "correct_from": 0.5}
    config = ExactReward.model_validate(keys)
    found = [finish_score(Score(1.0), config, "y", tokens) for tokens in (10, 15, 20)]
    assert [(score.value, score.outcome) for score in found] == [(0.75, "correct"), (0.5, "correct"), (0.25, "partial")]
    assert found[1].parts == {"answer": 1.0, "format": -0.25, "length_penalty": -0.25}


def test_unread_response_gets_all_penalties_in_full() -> None:
    """The response was not read, so it may have any length and any format."""
    keys = {"format": {"pattern": "x", "penalty": 0.25}, "length_penalty": RISING}
    assert ExactReward.model_validate(keys).unread_value == -0.75


@pytest.mark.long
async def test_workers_count_the_tokens_of_a_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_reach(monkeypatch, FOLDER)
    for name, data in build_cold_folder(ColdStart(), ["1 + 1 = 2"] * 10).items():
        (tmp_path / name).write_bytes(data)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    penalty = {"start": 0, "full": 10, "penalty": 1.0}
    one = ExactReward.model_validate({"length_penalty": penalty})
    several = ImportReward.model_validate({"path": f"{FUNCTIONS}:several", "length_penalty": penalty})
    for config, value in ((one, 1.0), (several, 0.75)):
        scorer = build_scorer(config, tmp_path)
        tokens = tokenizer.encode("12").ids
        await scorer.start()
        try:
            [found] = await asyncio.wait_for(scorer.score([ScoreRequest(tokens, {"answer": "12"})]), HANG_SECONDS)
        finally:
            await scorer.close()
        assert (len(tokens), found.value) == (2, pytest.approx(value - 0.2))
