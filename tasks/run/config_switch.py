"""Wraps the learner of a run whose config was changed, so that each policy version is trained with its own config.

    config A: version 1, 2, 3 --weights and state, as files--> config B: version 4, 5

When the config changes, a learner for the new config loads the weights and state of the old learner, so that training
continues bit for bit. Config keys that may change (`config_changes`) affect neither names nor shapes of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects import Data
from rollflow.storage.objects.base import split_buffers
from rollflow.storage.objects.disk import map_file
from rollflow.tasks.learners.base import Learner, WaitForPublish, no_wait
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.node import node_cache


class MappedFiles(Mapping[str, Data]):
    """A mapping from names to local files; each file is memory-mapped when its name is looked up."""

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self._paths = paths

    def __getitem__(self, name: str) -> Data:
        return map_file(self._paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


class ConfigSwitchLearner:
    """Wraps a `Learner`; if the config changes between two policy versions, the learner is built again."""

    def __init__(
        self,
        learner: Learner,
        config: RunConfig,
        config_at: Callable[[int], RunConfig],
        build: Callable[[RunConfig], Learner],
    ) -> None:
        """Start with the learner `learner`, which was built with `config`.

        Args:
            config_at: returns the config of a policy version.
            build: builds a learner whose weights are loaded later.
        """
        self._learner: Learner | None = learner
        self._terms, self._config_at, self._build = _terms(config), config_at, build

    @property
    def model(self) -> Any:
        """The model, as `Learner.model` specifies."""
        return self._now.model

    def step(self, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> Mapping[str, float]:
        """Run one train step, as `Learner.step` specifies, with the config of policy version `version + 1`."""
        config = self._config_at(version + 1)
        if _terms(config) != self._terms:
            self._change(config)
        return self._now.step(batch, version, settle)

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Do what `Learner.logprobs` specifies, with the current learner."""
        return self._now.logprobs(tokens)

    def first_nonfinite(self) -> str | None:
        """Do what `Learner.first_nonfinite` specifies, with the current learner."""
        return self._now.first_nonfinite()

    def check_ranks(self) -> None:
        """Do what `Learner.check_ranks` specifies, with the current learner."""
        self._now.check_ranks()

    def weights(self) -> Mapping[str, Data]:
        """Do what `Learner.weights` specifies, with the current learner."""
        return self._now.weights()

    def state(self) -> Mapping[str, Data]:
        """Do what `Learner.state` specifies, with the current learner."""
        return self._now.state()

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Do what `Learner.load` specifies, with the current learner."""
        self._now.load(weights, state)

    @property
    def _now(self) -> Learner:
        assert self._learner is not None, "a config change failed half-way, so another learner must be restored"
        return self._learner

    def _change(self, config: RunConfig) -> None:
        (cache := node_cache()).mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix="change-", dir=cache) as folder:
            # The state is written before `_build`, because `_build` draws random numbers.
            state = _write_files(self._now.state(), Path(folder))
            weights = _write_files(self._now.weights(), Path(folder))
            self._learner = None
            self._learner = self._build(config)
            self._learner.load(weights, state)
        self._terms = _terms(config)


def _terms(config: RunConfig) -> tuple[object, ...]:
    """Return the settings of a config on which a learner depends."""
    engine = config.engine
    return config.train, config.versions, engine.temperature, engine.max_new_tokens, config.store.shard_bytes


def _write_files(files: Mapping[str, Data], folder: Path) -> MappedFiles:
    paths = {name: folder / name.replace("/", "-") for name in files}
    for name, path in paths.items():
        with open(path, "wb") as file:
            file.writelines(split_buffers(files[name]))
    return MappedFiles(paths)
