"""Runs a policy on the prompts of a recipe in this process, with the recipe's environment, scorers and engine.

The prompts are the same as in a training run of the recipe: the same rows are left out, and the same prompts are held
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from rollflow.flows.policies.asked_policy import AskedPolicy
from rollflow.flows.ray_cluster.cluster import count_machine_gpus
from rollflow.storage.errors import Unreachable
from rollflow.storage.records import Prompt
from rollflow.tasks.engines import build_engine
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.environments import build_environment
from rollflow.tasks.environments.base import Environment
from rollflow.tasks.environments.ports import EnvironmentPorts
from rollflow.tasks.policies.vocabulary import read_vocabulary
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.evaluation import Evaluator
from rollflow.tasks.rollout.judging import Judge, judge_repeatedly
from rollflow.tasks.rollout.proxy import InferenceProxy
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import choose_evaluation_engine, open_prompts
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.run.prompt_check import fit_files, read_files
from rollflow.tasks.run.reward_models import local_copies
from rollflow.tasks.scorers import build_scorers
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest

START_SECONDS = 1800.0  # longest time in seconds until an engine or a scorer has started


@dataclass(frozen=True, slots=True)
class AskedRecipe:
    """The parts that an episode of a recipe needs besides its policy."""

    config: RunConfig
    prompts: RunPrompts
    environment: Environment
    ports: EnvironmentPorts
    vocabulary: int  # size of the policy's vocabulary


def open_recipe(config: RunConfig, policy: AskedPolicy, read: Reader) -> AskedRecipe:
    """Check the recipe's prompts as a new run does, and open them for this policy.

    Raises:
        ConfigError: a prompt cannot be asked or scored; the message says what the user must change.
    """
    read, _ = fit_files(config, read_files(config, read), policy.tokenizer, read, lambda _: None)
    return build_recipe(config, policy, open_prompts(config, policy.tokenizer, read))


def build_recipe(config: RunConfig, policy: AskedPolicy, prompts: RunPrompts) -> AskedRecipe:
    """Build the environment of a recipe and the ports through which it uses scorers and tokenizer. Return both with
    `prompts`.
    """
    environment, ports = build_environment(config.environment), build_ports(config, policy.tokenizer)
    return AskedRecipe(config, prompts, environment, ports, read_vocabulary(policy.folder))


def choose_engine(config: RunConfig, policy: AskedPolicy) -> EngineConfig:
    """Return the engine config that a run of the recipe would use on this machine to evaluate the policy."""
    return choose_evaluation_engine(config, policy.folder, on_cpu=not count_machine_gpus())


@asynccontextmanager
async def serve_policy(policy: AskedPolicy, engine: EngineConfig, config: RunConfig) -> AsyncIterator[InferenceProxy]:
    """Run an engine with the weights of a policy in this process, for the duration of a `with` block.

    Raises:
        EngineFailed: the engine did not start, or its log-probs differ from those of the learner.
    """
    started = build_engine(engine, policy.folder, dtype=config.policy.dtype)
    try:
        await _start(started.start(), "the engine")
        proxy = InferenceProxy([started], engine.max_concurrent_requests)
        weights = await asyncio.to_thread(policy.weights)
        await _start(proxy.update(policy.version, weights, policy.probe, "continue"), "the weights of the policy")
        yield proxy
    finally:
        await started.close()


@dataclass(frozen=True, slots=True)
class ServedScorer:
    """Scorers that run in this process. The task `serving` ends only if the scorers can score no response at all, and
    raises the reason."""

    scorer: Scorer
    serving: asyncio.Task[None]

    async def score(self, request: ScoreRequest) -> Score:
        """Score a response.

        Raises:
            ConfigError: the scorer can score no response at all.
        """
        [future] = self.scorer.submit([request])
        waited: list[asyncio.Future[Any]] = [future, self.serving]
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            self.serving.result()
        return await future


@asynccontextmanager
async def serve_scorer(config: RunConfig, policy: AskedPolicy) -> AsyncIterator[ServedScorer]:
    """Run the recipe's scorers in this process, for the duration of a `with` block."""
    copies = local_copies(policy.context, config) if policy.context else lambda section: None
    scorer = build_scorers(config.scorers, policy.folder, copies)
    await _start(scorer.start(), "the scorer")
    serving = asyncio.create_task(scorer.serve(asyncio.Event()))  # the event, which would end the scorers, is never set
    try:
        yield ServedScorer(scorer, serving)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await scorer.close()


def build_judge(config: RunConfig, served: ServedScorer, note: Callable[[], None] = lambda: None) -> Judge:
    """Return a function that scores one response, with at most as many attempts as the scorer's `judge_tries`. `note`
    is called after each score.
    """

    async def judge(request: ScoreRequest) -> Score:
        score = await judge_repeatedly(served.score, config.scorers[request.scorer].judge_tries)(request)
        note()
        return score

    return judge


class HeldOutPrompts(NamedTuple):
    """The prompts of an evaluation: the held-out prompts, and a mapping from the name of each evaluation set to its
    prompts.
    """

    prompts: Sequence[Prompt]
    sets: Mapping[str, Sequence[Prompt]]

    @property
    def size(self) -> int:
        """The number of all prompts."""
        return len(self.prompts) + sum(map(len, self.sets.values()))


def list_held_out(prompts: RunPrompts, limit: int | None = None) -> HeldOutPrompts:
    """Return the held-out prompts: all of them, or only the first `limit` prompts of each domain and each evaluation
    set.
    """
    held, sets = prompts.held_out(), prompts.evaluation_sets()
    if limit is None:
        return HeldOutPrompts(held, sets)
    domains = dict[str, list[Prompt]]()
    for prompt in held:
        domains.setdefault(prompt.domain, []).append(prompt)
    chosen = [prompt for found in domains.values() for prompt in found[:limit]]
    return HeldOutPrompts(chosen, {name: found[:limit] for name, found in sets.items()})


def build_evaluator(recipe: AskedRecipe, judge: Judge, asked: HeldOutPrompts, samples: int | None = None) -> Evaluator:
    """Build the evaluator of the held-out prompts. `judge` scores a response; `samples` is the number of responses to
    each prompt, by default the number in the recipe.
    """
    config, settings = recipe.config, recipe.config.evaluation
    return Evaluator(
        asked.prompts,
        settings.samples if samples is None else samples,
        settings.temperature,
        config.engine.max_new_tokens,
        judge,
        recipe.environment,
        recipe.vocabulary,
        recipe.ports,
        config.accuracy_shares,
        by_value=settings.correct == "value",
        sets=asked.sets,
    )


async def _start(starting: Awaitable[None], what: str) -> None:
    """Wait until a part, such as an engine, has started, but at most `START_SECONDS`."""
    try:
        async with asyncio.timeout(START_SECONDS):
            await starting
    except TimeoutError:
        raise Unreachable(f"{what} was not ready within {START_SECONDS:g} s; start the command again") from None
