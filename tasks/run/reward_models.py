"""Stores the reward models of a run: their files are copied into the run's storage and hashed when the run starts.

reward_models/reward/config.json                 the model of [reward]
reward_models/rewards.taste/...                  the model of [rewards.taste]
reward_models/reward.parts.style.scorer/...      the model of [reward.parts.style.scorer], a part of a composite reward

In the config, the Ray actors and the storage, a reward model is identified by its config section.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.objects.base import Data, hash_pieces, split_buffers
from rollflow.storage.objects.disk import map_file
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext, fetch_folder
from rollflow.tasks.scorers.config import list_remote
from rollflow.tasks.scorers.model.config import ModelReward
from rollflow.tasks.scorers.model.copies import LocalCopy, ModelCopies
from rollflow.tasks.scorers.model.folder import find_model, read_model

if TYPE_CHECKING:
    from rollflow.tasks.scorers.model.classifier import Classifier

FOLDER = "reward_models"


def list_models(config: RunConfig) -> dict[str, ModelReward]:
    """Return the reward models that a run uses, by their config sections."""
    remote = list_remote(config.scorers)
    return {section: reward for section, reward in remote.items() if isinstance(reward, ModelReward)}


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
    for section, reward in list_models(config).items():
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
    for section, reward in list_models(config).items():
        if not any(stored.path.startswith(f"{_prefix(section)}/") for stored in context.created.models):
            cure = "a run stores its reward models at its start, and this run has none for the scorer; start a new run"
            raise ConfigError(f"{section}.path = {reward.path!r}: {cure}")


def read_models(config: RunConfig) -> dict[str, Data]:
    """Return the files of a run's reward models, by their paths in the run's storage."""
    return {
        f"{_prefix(section)}/{file}": data
        for section, reward in list_models(config).items()
        for file, data in read_model(reward, section).items()
    }


def local_copies(context: RunContext, config: RunConfig | None = None) -> Callable[[str], ModelCopies | None]:
    """Return a function that returns, for the config section of a reward model, the model loaded in this process.

    `config` is the config of the scorers; the default is the config of the run. For a reward model that the run has not
    stored, the function returns None.
    """
    models = list_models(config or context.config)

    def find(section: str) -> ModelCopies | None:
        reward, own = models[section], list_models(context.config).get(section)
        if own is None or own.path != reward.path:
            return None
        return LocalCopy(partial(load_model, context, section, reward))

    return find


def load_model(context: RunContext, section: str = "reward", reward: ModelReward | None = None) -> Classifier:
    """Load a reward model from the run's storage, and check its files against the hashes in the log.

    `section` names the config section of the model, and `reward` is the parsed section.

    Raises:
        Corrupt: a file of the reward model was altered since the start of the run.
        ConfigError: the reward model cannot be loaded.
    """
    disable_optional_libraries()
    from rollflow.tasks.scorers.model.classifier import Classifier

    reward = reward or list_models(context.config)[section]
    return Classifier(reward, _fetch_model(context, section), section, context.created_at)


def _fetch_model(context: RunContext, section: str) -> Path:
    """Return a folder on this node with the files of the reward model in a config section."""
    folder = fetch_folder(context, _prefix(section), FOLDER, section)
    for stored in context.created.models:
        if stored.path.startswith(f"{_prefix(section)}/"):
            path = folder / stored.path.rpartition("/")[2]
            if not path.exists() or hash_pieces(split_buffers(map_file(path))) != stored.sha256:
                raise Corrupt(
                    f"{context.store.uri}/{stored.path}, the run's copy of a file of the reward model, is missing "
                    "or altered"
                )
    return folder


def _prefix(section: str) -> str:
    return f"{FOLDER}/{section}"
