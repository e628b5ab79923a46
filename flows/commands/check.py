"""What a recipe names on this machine, opened: files of prompts, the policy's folder, places that will be written.

No torch, Ray, vLLM, reasoning-gym or network; what only those can tell (a hub's policy, a family's options, whether a
server answers) is found when the run is prepared, before anything heavy starts.
"""

from __future__ import annotations

from pathlib import Path

from rollflow.flows.locations import store_uri
from rollflow.flows.services.reachability import check_folder, check_mlflow
from rollflow.tasks.config import JsonlPrompts, RunConfig
from rollflow.tasks.policies.folder import local_policy
from rollflow.tasks.prompts.jsonl import read_file
from rollflow.tasks.prompts.source import PromptOrder


def check_files(config: RunConfig) -> None:
    """Open what can be opened cheaply.

    Raises:
        ConfigError: with one sentence for the first thing a person must change.
    """
    files = [source for source in config.prompts if isinstance(source, JsonlPrompts)]
    if files:
        order = PromptOrder(files, config.seed, config.evaluation.prompts, None, 0, read_file)
        if len(files) == len(config.prompts):  # a family always has some to hold out
            order.check_held_out()
    if config.policy.path is not None:
        local_policy(config.policy.path)
    store = store_uri(config)
    if "://" not in store:
        check_folder("store.uri", store, Path(store).expanduser().absolute())
    if config.tracking.uri and config.tracking.uri.startswith(("sqlite:", "file:", "/", ".")):
        check_mlflow(config.tracking.uri)
