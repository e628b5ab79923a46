"""Evaluates one policy version of a run on the run's held-out prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from prefect import flow
from pydantic import NonNegativeInt

from rollflow.flows.locations import await_run
from rollflow.flows.policies.asked_policy import open_version
from rollflow.flows.policies.asked_recipe import (
    build_evaluator,
    build_judge,
    build_recipe,
    list_held_out,
    serve_policy,
    serve_scorer,
)
from rollflow.tasks.rollout.evaluation import Evaluation, read_evaluation, store_evaluation
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.names import RunPlace


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
    config, policy = context.config, open_version(context, version)
    recipe = build_recipe(config, policy, context.prompts())
    async with serve_policy(policy, config.engine, config) as proxy, serve_scorer(config, policy) as scorer:
        evaluator = build_evaluator(recipe, build_judge(config, scorer, note), list_held_out(recipe.prompts))
        return await evaluator.run(proxy, version)
