"""Implements `rollflow play RECIPE`: a person, a random policy, an endpoint or a version of a run plays the recipe's
environment in the terminal, and each episode is scored. The environment and the scorers work as in an evaluation of a
run. The command starts neither Ray nor Prefect, and writes nothing to the store.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.commands.play.endpoint import EndpointPlayer, read_token
from rollflow.flows.commands.play.game import Game
from rollflow.flows.commands.play.person_input import PersonInput
from rollflow.flows.commands.play.players import EnginePlayer, PersonPlayer, Player, RandomPlayer
from rollflow.flows.commands.play.screen import Screen
from rollflow.flows.config import load_recipe
from rollflow.flows.policies.asked_policy import AskedPolicy, open_policy, open_recipe_policy
from rollflow.flows.policies.asked_recipe import (
    AskedRecipe,
    build_judge,
    choose_engine,
    open_recipe,
    serve_policy,
    serve_scorer,
)
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Prompt
from rollflow.tasks.environments import close_environment
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.prompt_pins import read_once
from rollflow.tasks.run.user_code import check_own_parts
from rollflow.tasks.scorers.base import Score

KEYS = "Enter answers; \\ at the end of a line continues it; Ctrl-D ends."


def command(options: argparse.Namespace) -> int:
    """Play episodes, and show each one with its score."""
    if options.endpoint and not options.model:
        raise ConfigError("--endpoint needs the name of a model; add --model NAME")
    seed = [] if options.seed is None else [f"seed={options.seed}"]
    config = load_recipe(options.recipe, [*options.set, *seed])
    check_own_parts(config)
    with tempfile.TemporaryDirectory() as scratch:
        read = read_once()
        if options.run:
            policy = open_policy(options.run, options.version, options.store, config, Path(scratch))
        else:
            policy = open_recipe_policy(config, Path(scratch), read)
        _play(options, open_recipe(config, policy, read), policy)
    return OK


def _play(options: argparse.Namespace, recipe: AskedRecipe, policy: AskedPolicy) -> None:
    """Play until the last episode, the end of the input, or Ctrl-C; then show the mean score."""
    screen = Screen(Console(highlight=False))
    person = PersonInput() if not (options.random or options.endpoint or options.run) else None
    player = None if options.run else _choose_player(options, recipe.config, policy, person, screen)
    episodes = options.episodes or (None if person else 1)
    scores: list[Score] = []

    async def work() -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(close_environment, recipe.environment)
            chosen = player or await _serve_player(recipe.config, policy, stack)
            scorer = await stack.enter_async_context(serve_scorer(recipe.config, policy))
            game = Game(recipe, policy.tokenizer, chosen, build_judge(recipe.config, scorer), screen, scores)
            prompts = _list_prompts(recipe, held_out=options.held_out)
            for number, prompt in enumerate(itertools.islice(prompts, episodes), 1):
                await game.play(number, episodes, prompt)
                if game.is_over:
                    break

    try:
        if person is None:
            asyncio.run(work())
        else:
            screen.note(KEYS)
            person.run(work)
    finally:
        screen.summarize(scores)


def _choose_player(
    options: argparse.Namespace, config: RunConfig, policy: AskedPolicy, person: PersonInput | None, screen: Screen
) -> Player:
    """Return the player that the options name, which is a person, a random policy or an endpoint."""
    if person is not None:
        return PersonPlayer(policy.tokenizer, person.read_line, screen.note)
    if options.random:
        return RandomPlayer(policy.tokenizer, config.seed)
    token, temperature = read_token(options.token_env), config.evaluation.temperature
    return EndpointPlayer(
        options.model, options.endpoint, options.model, policy.tokenizer, temperature, config.seed, token
    )


async def _serve_player(config: RunConfig, policy: AskedPolicy, stack: AsyncExitStack) -> Player:
    """Start an inference engine for the policy that plays; the engine runs until `stack` is closed."""
    with Console(stderr=True, highlight=False).status(f"loading {policy.name}"):
        proxy = await stack.enter_async_context(serve_policy(policy, choose_engine(config, policy), config))
    return EnginePlayer(policy.name, proxy, config.evaluation.temperature, config.seed)


def _list_prompts(recipe: AskedRecipe, *, held_out: bool) -> Iterator[Prompt]:
    """Return the prompts to play: the held-out prompts, or the training prompts in the order of a run."""
    return iter(recipe.prompts.held_out()) if held_out else map(recipe.prompts.prompt, itertools.count())
