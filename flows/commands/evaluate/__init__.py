"""Implements `rollflow evaluate RUN|FOLDER RECIPE`, which measures a policy on the held-out prompts of a recipe. The
recipe's environment, scorers and evaluation engine are used as in an evaluation of a run, and nothing is written to the
run. Results are logged to the recipe's MLflow server (`tracking.uri`), if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

from rich.console import Console

from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.commands.cli.progress_line import show_progress
from rollflow.flows.commands.evaluate.report import EvaluationReport, print_report
from rollflow.flows.config import load_recipe
from rollflow.flows.policies.asked_policy import AskedPolicy, open_policy
from rollflow.flows.policies.asked_recipe import (
    AskedRecipe,
    HeldOutPrompts,
    build_evaluator,
    build_judge,
    choose_engine,
    list_held_out,
    open_recipe,
    serve_policy,
    serve_scorer,
)
from rollflow.storage.errors import ConfigError, Unreachable
from rollflow.tasks.environments import close_environment
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.prompt_pins import read_once
from rollflow.tasks.run.user_code import check_own_parts

TICK_SECONDS = 1.0  # longest time in seconds between two reports of the progress

Tell = Callable[[str], None]


def command(options: argparse.Namespace) -> int:
    """Evaluate a policy, and print its accuracies. Return `FAILED` if a response could not be judged.

    Raises:
        KeyboardInterrupt: the user has pressed Ctrl-C; the results so far were printed.
    """
    config = load_recipe(options.recipe, options.set)
    check_own_parts(config)
    samples = choose_samples(config, options.samples)
    with tempfile.TemporaryDirectory() as scratch:
        policy = open_policy(options.run, options.version, options.store, config, Path(scratch))
        recipe = open_recipe(config, policy, read_once())
        asked = list_held_out(recipe.prompts, options.limit)
        by_value = config.evaluation.correct == "value"
        report = EvaluationReport(
            policy.name, policy.version, samples, asked.size * samples, by_value, frozenset(asked.sets)
        )
        try:
            with show_progress(f"loading {policy.name}") as tell:
                asyncio.run(evaluate(recipe, policy, asked, report, tell))
        finally:
            show_report(report, options.json)
    if config.tracking.uri:
        track_report(config, report)
    return FAILED if report.unjudged else OK


def choose_samples(config: RunConfig, samples: int | None) -> int:
    """Return the number of responses to each prompt.

    Raises:
        ConfigError: greedy decoding with several responses to a prompt, which would all be the same.
    """
    count = samples or config.evaluation.samples
    if count > 1 and config.evaluation.temperature == 0:
        asked = f"evaluation.samples = {count}" if samples is None else f"--samples {count}"
        cure = "every sample would be the same; add --set evaluation.temperature=1, or --samples 1"
        raise ConfigError(f"{asked} with evaluation.temperature = 0: {cure}")
    return count


async def evaluate(
    recipe: AskedRecipe, policy: AskedPolicy, asked: HeldOutPrompts, report: EvaluationReport, tell: Tell
) -> None:
    """Let the policy answer the prompts, and add each scored response to the report.

    Raises:
        Unreachable: no response was finished for `rollout.patience_seconds`.
    """
    config = recipe.config
    engine = choose_engine(config, policy)
    async with serve_policy(policy, engine, config) as proxy, serve_scorer(config, policy) as served:
        [running] = proxy.engines.values()
        report.measures = await recipe.environment.measure(running.logprobs, recipe.ports)
        evaluator = build_evaluator(recipe, build_judge(config, served), asked, report.samples)
        answering = asyncio.create_task(evaluator.answer_all(proxy, policy.version, report.add))
        try:
            await _watch(answering, report, config.rollout.patience_seconds, tell)
        finally:
            answering.cancel()
            await asyncio.gather(answering, return_exceptions=True)
            await close_environment(recipe.environment)


async def _watch(answering: asyncio.Task[Any], report: EvaluationReport, patience: float, tell: Tell) -> None:
    """Wait for the end of the evaluation, show its progress, and end it if it makes no progress."""
    done, since = 0, time.monotonic()
    while not answering.done():
        await asyncio.wait([answering], timeout=TICK_SECONDS)
        tell(f"{report.done:,} of {report.asked:,} responses")
        if report.done != done:
            done, since = report.done, time.monotonic()
        elif time.monotonic() - since > patience and not answering.done():
            raise Unreachable(
                f"no response was finished within rollout.patience_seconds = {patience:g}; check whether the "
                "engine, the environment or the scorer hangs, or raise this key"
            )
    answering.result()


def show_report(report: EvaluationReport, file: Path | None) -> None:
    """Print the report, and write it to a file as JSON.

    Raises:
        ConfigError: the file cannot be written.
    """
    print_report(report, Console(highlight=False))
    if file is None:
        return
    try:
        file.write_text(json.dumps(report.build_value()) + "\n")
    except OSError as error:
        raise ConfigError(f"--json {str(file)!r} cannot be written: {error.strerror}; give another file") from None


def track_report(config: RunConfig, report: EvaluationReport) -> None:
    """Log the report to the recipe's MLflow server, as an MLflow run of its own; print a failure as a warning."""
    from rollflow.flows.tracking.mlflow_run import TrackingPlace
    from rollflow.flows.tracking.tracking import Tracker

    assert config.tracking.uri is not None, "the caller has found an address"
    place = TrackingPlace(config.tracking.uri, config.tracking.experiment or config.name)
    name = f"evaluation of {report.policy}"
    tracker = Tracker(place, name, config.model_dump(mode="json"), f"evaluation-{uuid4().hex}")
    tracker.log_evaluation(report.version, report.metrics, time.time())
    tracker.finish("FINISHED")
    for warning in tracker.warnings:
        print(f"rollflow: {warning}", file=sys.stderr)
