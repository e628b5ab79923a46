"""Stores the reward models of a run: their files are copied into the run's storage and hashed when the run starts.

reward_models/reward/config.json      the model of [reward]
reward_models/rewards.taste/...       the model of [rewards.taste]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.objects.base import Data, hash_pieces, split_buffers
from rollflow.storage.objects.disk import map_file
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, fetch_folder
from rollflow.tasks.scorers.config import RewardConfig, name_section
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.model.copies import LocalCopy, ModelCopies
from rollflow.tasks.scorers.model.folder import find_model, read_model

if TYPE_CHECKING:
    from rollflow.tasks.scorers.model.classifier import Classifier

FOLDER = "reward_models"


def list_models(config: RunConfig) -> dict[str, ModelReward]:
    """Return the reward models that a run uses, by the names of the scorers that use them."""
    return {name: reward for name, reward in config.scorers.items() if isinstance(reward, ModelReward)}


def model_gpus(config: RunConfig) -> float:
    """Return the number of GPUs that the reward models of a run need, over all their copies."""
    return sum(reward.workers * reward.gpus for reward in list_models(config).values())


def model_cpus(config: RunConfig) -> float:
    """Return the number of CPUs that the reward models of a run need, over all their copies."""
    return float(sum(reward.workers * reward.cpus for reward in list_models(config).values()))


def check_models(config: RunConfig, download: bool) -> Iterator[str]:
    """Check the reward models of a new run; yield a note on each reward model that has not been downloaded.

    Raises:
        ConfigError: a reward model cannot be used; the message names the key and says what the user must change.
    """
    for name, reward in list_models(config).items():
        section = name_section(name)
        if config.policy.cold_start is not None:
            cure = "a cold start is judged by answers, which a reward model does not know; set policy.path"
            raise ConfigError(f'{section}.kind = "model": {cure}')
        if reward.deadline_seconds >= (patience := config.rollout.patience_seconds):
            cure = f"the run fails after rollout.patience_seconds = {patience:g} without a score; choose less"
            raise ConfigError(f"{section}.deadline_seconds = {reward.deadline_seconds:g}: {cure}")
        folder = find_model(reward, section, download)
        if folder is None:
            yield (
                f"{section}.path = {reward.path!r} is not in this machine's cache of the Hugging Face hub, so the "
                "reward model was not checked; `rollflow run` downloads and checks it first"
            )
            continue
        from rollflow.tasks.scorers.model.classifier import check_model  # imports torch

        check_model(reward, folder, section)


def check_pinned(config: RunConfig, context: RunContext) -> None:
    """Check that the run has stored every reward model that a changed config needs.

    Raises:
        ConfigError: a reward model is not in the run's storage.
    """
    for name, reward in list_models(config).items():
        if not any(stored.path.startswith(f"{_prefix(name)}/") for stored in context.created.models):
            cure = "a run stores its reward models at its start, and this run has none for the scorer; start a new run"
            raise ConfigError(f"{name_section(name)}.path = {reward.path!r}: {cure}")


def read_models(config: RunConfig) -> dict[str, Data]:
    """Return the files of a run's reward models, by their paths in the run's storage."""
    return {
        f"{_prefix(name)}/{file}": data
        for name, reward in list_models(config).items()
        for file, data in read_model(reward, name_section(name)).items()
    }


def local_copies(
    context: RunContext, scorers: Mapping[str, RewardConfig] | None = None
) -> Callable[[str], ModelCopies | None]:
    """Return a function from the name of a scorer to the run's reward model, loaded in this process.

    `scorers` are the config sections of the scorers, by default those of the run. A scorer whose reward model is not
    stored with the run gets None, and reads the model from the folder in the config.
    """
    sections = context.config.scorers if scorers is None else scorers

    def find(name: str) -> ModelCopies | None:
        reward, own = sections[name], list_models(context.config).get(name)
        if not isinstance(reward, ModelReward) or own is None or own.path != reward.path:
            return None
        return LocalCopy(partial(load_model, context, name, reward))

    return find


def load_model(context: RunContext, scorer: str, reward: ModelReward | None = None) -> Classifier:
    """Load the reward model of a scorer from the run's storage, and check its files against the hashes in the log.

    `reward` is the config section of the scorer, by default the section in the run's config.

    Raises:
        Corrupt: a file of the reward model was altered since the start of the run.
        ConfigError: the reward model cannot be loaded.
    """
    disable_optional_libraries()
    from rollflow.tasks.scorers.model.classifier import Classifier

    reward = reward or list_models(context.config)[scorer]
    return Classifier(reward, _fetch_model(context, scorer), name_section(scorer), context.created_at)


def _fetch_model(context: RunContext, scorer: str) -> Path:
    """Return a folder on this node with the files of the reward model that a scorer uses."""
    folder = fetch_folder(context, _prefix(scorer), FOLDER, name_section(scorer))
    for stored in context.created.models:
        if stored.path.startswith(f"{_prefix(scorer)}/"):
            path = folder / stored.path.rpartition("/")[2]
            if not path.exists() or hash_pieces(split_buffers(map_file(path))) != stored.sha256:
                raise Corrupt(f"{context.store.uri}/{stored.path}, a file of the reward model, is missing or altered")
    return folder


def _prefix(scorer: str) -> str:
    return f"{FOLDER}/{name_section(scorer)}"
