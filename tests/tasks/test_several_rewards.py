"""Tests several scorers in one run: each prompt names its scorer, and no scorer waits for another scorer."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.config import override_config, parse_config
from rollflow.flows.keepalive.placement import needed_cpus
from rollflow.storage.errors import ConfigError
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.rollout.evaluation import DomainResult, Evaluation, Evaluator, read_newest, store_evaluation
from rollflow.tasks.rollout.limits import JudgingLimits
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import explain_fixed
from rollflow.tasks.run.context import parse_recorded
from rollflow.tasks.run.limits import build_limits
from rollflow.tasks.run.prompt_check import read_files
from rollflow.tasks.run.user_code import own_code
from rollflow.tasks.runtime.clock import run_virtual
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest
from rollflow.tasks.scorers.config import ExactReward
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.routed import RoutedScorer
from rollflow.tasks.scorers.verifier import apply_threshold
from tests.support.pipeline import Pipeline, prompt_at
from tests.support.user_code import FOLDER, put_in_reach
from tests.support.waiting import HANG_SECONDS

WORKER = """
import json, os, sys, time
print("ready", flush=True)
for line in sys.stdin:
    reference = json.loads(line)["reference"]
    if reference.get("dies"): os._exit(3)
    if reference.get("hangs"): time.sleep(600)
    print(json.dumps([1.0, sys.argv[1], "correct", {}, 0.0]), flush=True)
"""
RECIPE: dict[str, Any] = {
    "prompts": [{"kind": "sorting"}, {"kind": "column-sums", "reward": "sums", "share": 3}],
    "rewards": {"sums": {"kind": "exact", "answer": "tag", "workers": 3, "judge_tries": 5, "max_unjudged": 7}},
}


def pool(name: str, deadline: float) -> RewardPool:
    """Create a pool whose worker process writes the pool's name as the reason of each score."""
    made = RewardPool(ExactReward(deadline_seconds=deadline), Path())
    made._command = [sys.executable, "-c", WORKER, name]
    return made


def requests(*of: tuple[str, dict[str, Any]]) -> list[ScoreRequest]:
    return [ScoreRequest([5], reference, name) for name, reference in of]


async def test_each_request_gets_the_score_of_its_scorer() -> None:
    scorer = RoutedScorer({"": pool("default", HANG_SECONDS), "math": pool("math", HANG_SECONDS)})
    await scorer.start()
    try:
        asked = requests(("math", {}), ("", {}), ("math", {}), ("", {}))
        found = await asyncio.wait_for(scorer.score(asked), HANG_SECONDS)
        assert [score.reason for score in found] == ["math", "default", "math", "default"]
        assert scorer.usage.scored == 4
        with pytest.raises(ConfigError, match=r"rewards\.code: a prompt names this scorer"):
            scorer.submit(requests(("code", {})))
    finally:
        await scorer.close()


@pytest.mark.parametrize("fault", ["hangs", "dies"])
async def test_faulty_scorer_does_not_delay_other_scorers(fault: str) -> None:
    """The scores of the other scorer arrive although the only worker of the faulty scorer hangs or dies."""
    scorer = RoutedScorer({"": pool("default", HANG_SECONDS), "odd": pool("odd", 1.0 if fault == "hangs" else 600.0)})
    await scorer.start()
    try:
        faulty = scorer.submit(requests(*[("odd", {fault: True})] * 2))
        quick = await asyncio.wait_for(scorer.score(requests(*[("", {})] * 40)), HANG_SECONDS)
        assert [score.reason for score in quick] == ["default"] * 40
        late = await asyncio.wait_for(asyncio.gather(*faulty), HANG_SECONDS)
        outcome = Outcome.TIMEOUT if fault == "hangs" else Outcome.KILLED
        assert [(score.value, score.outcome) for score in late] == [(0.0, outcome)] * 2
    finally:
        await scorer.close()


async def test_hanging_scorer_does_not_delay_other_scorers() -> None:
    scorer = RoutedScorer({"": pool("default", HANG_SECONDS), "odd": pool("odd", 600.0)})
    await scorer.start()
    try:
        [hanging] = scorer.submit(requests(("odd", {"hangs": True})))
        await asyncio.wait_for(scorer.score(requests(*[("", {})] * 40)), HANG_SECONDS)
        assert not hanging.done()
    finally:
        await scorer.close()


async def test_error_names_a_scorer_without_any_worker() -> None:
    broken = RewardPool(ExactReward(), Path(), "rewards.math")
    broken._command = [sys.executable, "-c", "print('no module', flush=True)"]
    scorer = RoutedScorer({"": pool("default", HANG_SECONDS), "math": broken})
    await scorer.start()
    try:
        with pytest.raises(ConfigError, match=r"rewards\.math\.kind = 'exact': 5 workers in a row did not get ready"):
            await asyncio.wait_for(scorer.serve(asyncio.Event()), HANG_SECONDS)
    finally:
        await scorer.close()


def test_prompt_has_the_scorer_of_its_source() -> None:
    prompts = RunPrompts(parse_config(RECIPE).prompts, 0, 4, lambda *_: [1], 100, read_file)
    assert [prompts.prompt(index).scorer for index in range(4)] == ["", "sums", "", "sums"]
    assert {(one.domain, one.scorer) for one in prompts.held_out()} == {("sorting", ""), ("column-sums", "sums")}
    assert prompts.demonstration(0)[0].scorer == "sums"


def test_prompt_has_its_messages_and_system_message() -> None:
    sources = parse_config({"prompts": [{"kind": "sorting", "chat": True, "system": "Be brief."}]}).prompts
    prompt = RunPrompts(sources, 0, 4, lambda *_: [1], 100, read_file).prompt(0)
    assert [*prompt.messages] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt.text}]


def rows_config(path: Path, *names: object) -> RunConfig:
    rows: Iterable[dict[str, Any]] = ({"question": f"q{n}", "answer": "1", "by": name} for n, name in enumerate(names))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(path), "reward": "one", "reward_column": "by", "held_out": 0}
    return parse_config({"prompts": [source], "rewards": {"one": {"kind": "exact"}, "two": {"kind": "exact"}}})


def test_prompt_row_may_name_its_own_scorer(tmp_path: Path) -> None:
    config = rows_config(tmp_path / "rows.jsonl", "two", None, "", "one", "two")
    read_files(config, read_file)
    assert [*config.scorers] == ["one", "two"]
    prompts = RunPrompts(config.prompts, 0, 1, lambda *_: [1], 100, read_file)
    found = {prompts.prompt(index).text: prompts.prompt(index).scorer for index in range(5)}
    assert found == {"q0": "two", "q1": "one", "q2": "one", "q3": "one", "q4": "two"}


@pytest.mark.parametrize("name", ["three", 7, ["two"], "reward"])
def test_unknown_scorer_in_a_row_is_refused_with_its_line(tmp_path: Path, name: object) -> None:
    config = rows_config(tmp_path / "rows.jsonl", "two", name, "one", name)
    with pytest.raises(ConfigError, match=r"line 2: by names a scorer \(.*\) that does not exist; .*2 such lines"):
        read_files(config, read_file)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"rewards": {}}, r"prompts\.1\.reward = 'sums': there is no scorer of this name; add \[rewards\.sums\]"),
        ({"rewards": {"sums": {"kind": "exact"}}}, r"rewards\.sums\.answer = 'all': .*set rewards\.sums\.answer"),
        ({"rewards": {"sums": {"kind": "reasoning-gym"}}}, r"rewards\.sums\.kind = 'reasoning-gym'"),
        ({"rewards": {"sums": {"workers": 1}}}, r"rewards\.sums = .* has no kind"),
        ({"rewards": RECIPE["rewards"] | {"code": {"kind": "exact", "workers": 0}}}, r"rewards\.code\.workers = 0 is"),
        ({"rewards": RECIPE["rewards"] | {"x": {"kind": "exact", "workrs": 1}}}, r"did you mean rewards\.x\.workers\?"),
        ({"rewards": RECIPE["rewards"] | {"a.b": {"kind": "exact"}}}, "rename the scorer"),
        ({"reward": {"kind": "exact", "judge_tries": 0}}, r"reward\.judge_tries = 0: either every scorer"),
    ],
)
def test_invalid_table_of_scorers_is_refused(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        parse_config({**RECIPE, **tree})


def test_only_used_scorers_start() -> None:
    config = parse_config(RECIPE | {"rewards": RECIPE["rewards"] | {"idle": {"kind": "exact", "workers": 50}}})
    assert [*config.scorers] == ["", "sums"]
    assert config.scorer_workers == 1 + 3
    one = parse_config({})
    assert needed_cpus(config) - needed_cpus(one) == 3
    named = parse_config(RECIPE | {"prompts": RECIPE["prompts"][1:]})
    assert [*named.scorers] == ["sums"]


def test_keys_of_each_scorer_cannot_change_during_a_run() -> None:
    config = parse_config(RECIPE)
    for key in ("reward.kind", "rewards.sums.kind", "rewards.sums.answer", "rewards.sums.correct_from"):
        assert explain_fixed(config, key)
    assert not explain_fixed(config, "rewards.sums.workers")
    changed = override_config(config.model_dump(mode="json"), ["rewards.sums.workers=9"])
    assert changed.rewards["sums"].workers == 9


def test_user_code_of_every_scorer_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_reach(monkeypatch, FOLDER)
    near = {"kind": "import", "path": "letters.rewards:near"}
    assert [*own_code(parse_config({"reward": near, "rewards": {"far": near}}))] == ["reward", "rewards.far"]


def test_each_scorer_has_its_own_number_of_retries() -> None:
    limits = build_limits(parse_config(RECIPE))
    assert (limits.judge_tries(""), limits.judge_tries("sums")) == (3, 5)
    assert limits.judging_of("sums") == JudgingLimits(5, 7)


class TwoJudges(Pipeline):
    """A pipeline in which every second prompt names the scorer `lost`, which judges no response."""

    def _prompt(self, index: int) -> Prompt:
        return replace(super()._prompt(index), scorer="lost" if index % 2 else "")

    async def _score(self, request: ScoreRequest) -> Score:
        return Score(0.0, "away", Outcome.UNJUDGED) if request.scorer == "lost" else await super()._score(request)


def test_run_fails_if_one_scorer_judges_no_response() -> None:
    """Groups of the other scorer are judged meanwhile. They must not reset the count of unjudged prompts of the scorer
    `lost`.
    """
    limits = {"": JudgingLimits(2, 20), "lost": JudgingLimits(1, 4)}
    pipeline = TwoJudges(MemoryStore("two"), versions=50, choices={"judging": limits})
    with pytest.raises(ExceptionGroup) as failed:
        run_virtual(pipeline.run())
    error: BaseException = failed.value
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    assert "rewards.lost.max_unjudged = 4" in str(error)


@pytest.mark.parametrize(
    ("score", "outcome"),
    [
        (Score(0.5), Outcome.CORRECT),
        (Score(0.4, outcome=Outcome.CORRECT), Outcome.PARTIAL),
        (Score(0.4), Outcome.PARTIAL),
        (Score(0.0, outcome=Outcome.TIMEOUT), Outcome.TIMEOUT),
        (Score(1.0, outcome=Outcome.UNJUDGED), Outcome.UNJUDGED),
    ],
)
def test_key_correct_from_decides_which_responses_are_correct(score: Score, outcome: Outcome) -> None:
    assert apply_threshold(score, 0.5).outcome is outcome
    assert apply_threshold(score, None) == score


def evaluate(shares: dict[str, float], *, by_value: bool = False) -> Evaluation:
    """Evaluate one prompt of domain "a", whose responses are right, and three prompts of domain "b". Only the responses
    to the last one are right.
    """

    async def score(request: ScoreRequest) -> Score:
        right = request.reference["right"]
        return Score(2.0, outcome=Outcome.CORRECT) if right else Score(1.0, outcome=Outcome.WRONG)

    async def main() -> Evaluation:
        engine = TimedEngine(TimedEngineConfig(max_new_tokens=8))
        await engine.start()
        proxy = InferenceProxy([engine], 4)
        await proxy.update(0, Path(), WeightsProbe((), (), 0.1), "continue")
        asked = [("a", True), ("b", False), ("b", False), ("b", True)]
        prompts = [
            replace(prompt_at(place), domain=domain, reference={"right": right})
            for place, (domain, right) in enumerate(asked)
        ]
        return await Evaluator(prompts, 2, 1.0, 8, score, shares=shares, by_value=by_value).run(proxy, 0)

    return run_virtual(main())


def test_accuracy_is_the_share_weighted_mean_over_domains() -> None:
    found = evaluate({"a": 0.25, "b": 0.75})
    assert found.domains == {"a": DomainResult(1.0, 2.0, 2), "b": DomainResult(1 / 3, 4 / 3, 6)}
    assert found.accuracy == pytest.approx(0.25 * 1.0 + 0.75 / 3)
    assert found.reward == pytest.approx(0.25 * 2.0 + 0.75 * 4 / 3)
    assert found.pass_at == pytest.approx({2: 0.25 * 1.0 + 0.75 / 3})
    assert found.metrics["accuracy_b"] == 1 / 3
    assert found.metrics["reward_a"] == 2.0
    store = MemoryStore("evaluations")
    store_evaluation(store, found)
    assert read_newest(store) == found


def test_accuracy_of_a_recorded_run_is_over_all_responses() -> None:
    assert evaluate({}).accuracy == 0.5
    recorded = RunConfig().model_dump(mode="json")
    for section, key in (("evaluation", "mean"), ("evaluation", "correct"), ("reward", "correct_from")):
        del recorded[section][key]
    del recorded["rewards"]
    found = parse_recorded(recorded)
    assert (found.evaluation.mean, found.evaluation.correct, found.accuracy_shares) == ("responses", "value", {})
    by_value = evaluate({}, by_value=True)  # only the wrong responses have a reward of exactly 1
    assert (by_value.domains["a"].accuracy, by_value.domains["b"].accuracy) == (0.0, 2 / 3)
    assert parse_config(RECIPE).accuracy_shares == {"sorting": 0.25, "column-sums": 0.75}


def test_single_scorer_needs_no_routing() -> None:
    from rollflow.tasks.scorers import build_scorers

    one: Scorer = build_scorers(parse_config({}).scorers, Path())
    assert isinstance(one, RewardPool)
    assert isinstance(build_scorers(parse_config(RECIPE).scorers, Path()), RoutedScorer)
