"""Tests `rollflow evaluate`, which measures a stored or exported version on a recipe's held-out prompts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands import evaluate as evaluating
from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.exit_codes import FAILED, INTERRUPTED
from rollflow.flows.commands.evaluate.report import EvaluationReport
from rollflow.flows.evaluate import evaluate_now
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.rollout.evaluation import EvaluatedResponse
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.scorers.base import Score
from tests.support.refused import refused
from tests.support.small_run import prepare_small, train_small
from tests.support.user_code import FOLDER, put_in_reach

RECIPE = """
name = "numbers"
groups = 2
group_size = 4
[policy]
path = "policy"
[engine]
kind = "transformers"
max_new_tokens = 8
[evaluation]
prompts = 6
temperature = 1.0
[[prompts]]
kind = "import"
path = "letters.prompts:LetterCounts"
name = "short"
options = { length = 5 }
[[prompts]]
kind = "import"
path = "letters.prompts:LetterCounts"
name = "long"
options = { length = 8 }
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train two versions of a run in a new run home, which also contains a recipe."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        put_in_reach(patch, FOLDER)
        context = prepare_small(home, versions=2)
        train_small(context)
        (home / "numbers.toml").write_text(RECIPE)
        yield context


@pytest.fixture
def recipe(run: RunContext) -> str:
    return str(Path(os.environ["ROLLFLOW_HOME"]) / "numbers.toml")


def measure(capsys: pytest.CaptureFixture[str], tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run `rollflow evaluate`; return its JSON output and the printed text."""
    file = tmp_path / "figures.json"
    assert main(["evaluate", *arguments, "--json", str(file)]) == 0
    return json.loads(file.read_text()), capsys.readouterr().out


def test_evaluate_shows_confidence_intervals_of_each_domain(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, out = measure(capsys, tmp_path, "small", recipe)
    assert (found["policy"], found["asked"], found["done"], found["unjudged"]) == ("version 2 of run small", 6, 6, 0)
    assert list(found["groups"]) == ["held out", "long", "short"]
    for group in found["groups"].values():
        assert group["interval"][0] <= group["accuracy"] <= group["interval"][1]
    assert "version 2 of run small" in out
    assert "95% interval" in out


def test_evaluate_command_finds_the_same_accuracy_as_the_run(
    run: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """`rollflow evaluate` finds the accuracy and the reward that the run's own evaluation has found with the same
    config.
    """
    expected = asyncio.run(evaluate_now(run, 1))
    home = Path(os.environ["ROLLFLOW_HOME"])
    sums = home / "sums.toml"
    sums.write_text(
        'groups = 2\ngroup_size = 4\n[policy]\npath = "policy"\n[engine]\nkind = "transformers"\nmax_new_tokens = 8\n'
        '[evaluation]\nprompts = 4\n[[prompts]]\nkind = "reasoning-gym"\nfamily = "basic_arithmetic"\n'
        "[prompts.options]\nmin_terms = 3\nmax_terms = 3\nmin_digits = 1\nmax_digits = 1\n"
        'operators = ["+"]\nallow_parentheses = false\nallow_negation = false\n'
    )
    found, _ = measure(capsys, tmp_path, "small", str(sums), "--version", "1")
    group = found["groups"]["held out"]
    assert (group["accuracy"], group["tokens"]) == (expected.accuracy, expected.mean_tokens)
    assert group["reward"] == pytest.approx(expected.reward)


def test_exported_policy_has_the_same_accuracy_as_its_version(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "exported"
    assert main(["export", "small", "2", str(folder)]) == 0
    capsys.readouterr()
    version, _ = measure(capsys, tmp_path, "small", recipe)
    exported, out = measure(capsys, tmp_path, str(folder), recipe)
    assert exported["groups"] == version["groups"]
    assert str(folder) in out.replace("\n", "")
    assert "leave --version out" in refused(capsys, "evaluate", str(folder), recipe, "--version", "1")


def test_option_limit_limits_the_prompts_of_each_domain(
    recipe: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found, out = measure(capsys, tmp_path, "small", recipe, "--limit", "1", "--samples", "6")
    assert {name: group["prompts"] for name, group in found["groups"].items()} == {"held out": 2, "long": 1, "short": 1}
    assert found["groups"]["held out"]["responses"] == 12
    assert list(found["groups"]["held out"]["pass_at"]) == ["2", "4", "6"]
    assert "pass@6" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--samples", "2"], "--samples 2"), (["--set", "evaluation.samples=3"], "evaluation.samples = 3")],
    ids=["option", "recipe"],
)
def test_several_samples_at_temperature_zero_are_refused(
    recipe: str, capsys: pytest.CaptureFixture[str], options: list[str], named: str
) -> None:
    said = refused(capsys, "evaluate", "small", recipe, *options, "--set", "evaluation.temperature=0")
    assert f"{named} with evaluation.temperature = 0" in said


def test_interrupted_evaluation_prints_its_partial_results(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After two responses the scorer hangs, and the user presses Ctrl-C."""
    build = evaluating.build_judge

    def hang_after_two(*given: Any) -> Any:
        judge, seen = build(*given), [0]

        async def score(request: Any) -> Score:
            seen[0] += 1
            if seen[0] > 2:
                if seen[0] == 3:
                    asyncio.get_running_loop().call_later(2.0, os.kill, os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            return await judge(request)

        return score

    monkeypatch.setattr(evaluating, "build_judge", hang_after_two)
    # a shell that starts the tests in the background lets them ignore the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["evaluate", "small", recipe]) == INTERRUPTED
    finally:
        signal.signal(signal.SIGINT, before)
    captured = capsys.readouterr()
    assert "stopped after 2 of 6 responses" in captured.out
    assert "rollflow: stopped" in captured.err


def test_hanging_evaluation_ends_with_an_error(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def hang(request: Any) -> Score:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(evaluating, "build_judge", lambda *given: hang)
    monkeypatch.setattr(evaluating, "TICK_SECONDS", 0.1)
    assert main(["evaluate", "small", recipe, "--set", "rollout.patience_seconds=0.5"]) == FAILED
    assert "no response was finished within rollout.patience_seconds = 0.5" in capsys.readouterr().err


def test_evaluation_is_logged_to_mlflow_if_tracking_uri_is_set(recipe: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert main(["evaluate", "small", recipe, "--limit", "1", "--set", f"tracking.uri={uri}"]) == 0
    client = MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("numbers")
    assert experiment is not None
    [logged] = client.search_runs([experiment.experiment_id])
    assert logged.info.run_name == "evaluation of version 2 of run small"
    assert {"eval/accuracy", "eval/accuracy_low", "eval/accuracy_short"} <= logged.data.metrics.keys()
    assert logged.info.status == "FINISHED"


def test_unjudged_responses_do_not_count_in_the_accuracy() -> None:
    report = EvaluationReport("policy", 0, 1, 3, by_value=False, sets=frozenset({"named"}))
    for index, (domain, outcome) in enumerate(
        [("a", Outcome.CORRECT), ("a", Outcome.UNJUDGED), ("named", Outcome.WRONG)]
    ):
        prompt = Prompt(str(index), index, domain, "?", ModelInput.of([1]))
        report.add(EvaluatedResponse(prompt, Score(0.0, "no judge", outcome), (0, 0), 1))
    value = report.build_value()
    assert (value["done"], value["unjudged"], report.unjudged) == (3, 1, "no judge")
    assert {name: group["accuracy"] for name, group in value["groups"].items()} == {"held out": 1.0, "named": 0.0}
