"""`rollflow check RECIPE`: validate a recipe, and open what it names on this machine: your own parts, prompts, the
policy's folder, places to write.

It needs no torch, Ray, vLLM, reasoning-gym or network, unless your own parts do. What only those can tell (a hub's
policy, a family's options, whether a server answers) is found when the run is prepared, before anything heavy starts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rollflow.flows.commands import OK
from rollflow.flows.commands.toml import to_toml
from rollflow.flows.config import load_recipe
from rollflow.flows.locations import store_uri
from rollflow.flows.services.reachability import check_folder, check_mlflow
from rollflow.tasks.config import RunConfig
from rollflow.tasks.own_parts import check_own_parts
from rollflow.tasks.policies.folder import local_policy
from rollflow.tasks.prompts.config import ReasoningGymPrompts
from rollflow.tasks.prompts.jsonl import read_file
from rollflow.tasks.prompts.run_prompts import RunPrompts


def command(options: argparse.Namespace) -> int:
    """`rollflow check RECIPE`."""
    config = load_recipe(options.recipe, options.set)
    held_out = check_files(config)
    if options.json:
        print(json.dumps(config.model_dump(mode="json")))
        return OK
    if options.resolved:
        print(to_toml(config.model_dump(mode="json")), end="")
        return OK
    print(
        f"{options.recipe}: good. {config.versions} versions of {config.groups} groups x {config.group_size} "
        f"responses, async_ratio {config.async_ratio:g}, engine {config.engine.kind}, learner {config.train.learner}"
    )
    if held_out < config.evaluation.prompts:
        few = f"only {held_out} are held out to evaluate with; raise prompts.held_out or give more lines"
        print(f"evaluation.prompts = {config.evaluation.prompts}: {few}")
    return OK


def check_files(config: RunConfig) -> int:
    """Open what can be opened cheaply. Returns how many prompts an evaluation will have.

    Raises:
        ConfigError: with one sentence for the first thing a person must change.
    """
    check_own_parts(config)
    held_out = config.evaluation.prompts  # a family always has as many
    light = [source for source in config.prompts if not isinstance(source, ReasoningGymPrompts)]
    if light:
        prompts = RunPrompts(light, config.seed, config.evaluation.prompts, None, 0, read_file)
        if len(light) == len(config.prompts):
            held_out = prompts.count_held_out()
    if config.policy.path is not None:
        local_policy(config.policy.path)
    store = store_uri(config)
    if "://" not in store:
        check_folder("store.uri", store, Path(store).expanduser().absolute())
    if config.tracking.uri and config.tracking.uri.startswith(("sqlite:", "file:", "/", ".")):
        check_mlflow(config.tracking.uri)
    return held_out
