"""Evaluates one policy version of a run on the run's held-out prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from prefect import flow
from pydantic import NonNegativeInt

from rollflow.flows.locations import await_run
from rollflow.storage.errors import ConfigError, Missing
from rollflow.tasks.engines import build_engine
from rollflow.tasks.environments import build_environment
from rollflow.tasks.rollout.evaluation import Evaluation, Evaluator, read_evaluation, store_evaluation
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.run.reward_models import local_copies
from rollflow.tasks.runtime.names import RunPlace
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest


@flow(name="evaluate")
def evaluate(run: RunPlace, version: NonNegativeInt) -> dict[str, Any]:
    """Return the held-out evaluation of the policy version `version`. If no evaluation of the policy version is stored,
    evaluate the version on a new inference engine.
    """
    return asdict(evaluate_version(await_run(run), version))


def evaluate_version(context: RunContext, version: int, note: Callable[[], None] = lambda: None) -> Evaluation:
    """Return the stored held-out evaluation of a policy version. If no evaluation is stored, evaluate the policy
    version and store the result.
    """
    if stored := read_evaluation(context.store, version):
        return stored
    evaluation = asyncio.run(evaluate_now(context, version, note))
    store_evaluation(context.store, evaluation)
    return evaluation


async def evaluate_now(context: RunContext, version: int, note: Callable[[], None] = lambda: None) -> Evaluation:
    """Evaluate a policy version: load it into a new inference engine, and generate and score answers to the held-out
    prompts.
    """
    config = context.config
    published = context.policies.find(version)
    try:
        context.policies.check_kept(published)
    except Missing:
        raise ConfigError(
            f"version = {version}: the weights of this version were deleted; choose a version that "
            "store.keep_every or store.keep_last kept"
        ) from None
    engine = build_engine(config.engine, context.policy_folder, dtype=config.policy.dtype)
    scorer = build_scorers(config.scorers, context.policy_folder, local_copies(context))
    await asyncio.gather(engine.start(), scorer.start())
    try:
        proxy = InferenceProxy([engine], config.engine.max_concurrent_requests)
        probe = WeightsProbe(context.probe_tokens, published.probe, config.probe_tolerance)
        await proxy.update(version, await asyncio.to_thread(context.weights, version), probe, "continue")
        return await build_evaluator(context, scorer, note).run(proxy, version)
    finally:
        await asyncio.gather(engine.close(), scorer.close())


def build_evaluator(context: RunContext, scorer: Scorer, note: Callable[[], None]) -> Evaluator:
    """Build the evaluator for the run's held-out prompts. `note` is called after each scored answer."""

    async def score(request: ScoreRequest) -> Score:
        score = (await scorer.score([request]))[0]
        note()
        return score

    settings, longest = context.config.evaluation, context.config.engine.max_new_tokens
    held, environment = context.prompts().held_out(), build_environment(context.config.environment)
    ports = build_ports(context.config, context.tokenizer)
    return Evaluator(
        held,
        settings.samples,
        settings.temperature,
        longest,
        score,
        environment,
        ports=ports,
        shares=context.config.accuracy_shares,
        by_value=settings.correct == "value",
    )
