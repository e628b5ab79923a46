"""A run as every process sees it: where its storage is, its config, its policy folder, its prompts.

`RunContext` is a small picklable value; everything behind it is read from storage, which is the authority.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.storage.log.configs import RecordedConfig, readable_configs
from rollflow.storage.log.entries import Entry, Role, RunCreated, entry_path
from rollflow.storage.log.reading import there
from rollflow.storage.log.run_log import Log, Writer, creation
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.objects.node_cache import NodeCache
from rollflow.storage.policies import PolicyStore
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.engines.runnable import find_folder_hindrance
from rollflow.tasks.policies.folder import is_weights
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.held_out import Split
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.evaluation import evaluated
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.prompt_pins import PINS, check_asked, reader, split_of
from rollflow.tasks.runtime.names import run_id as checked
from rollflow.tasks.runtime.node import node_cache

FORMAT = 5  # raised with that of any record, so that no older run is touched


@dataclass(frozen=True)
class RunContext:
    """One run. `uri` is its own storage (`<store>/runs/<run id>`), `cache` this node's folder for fetched files.

    Paths do not travel: on another node, `cache` is that node's own folder.

    `patience`: seconds to wait for a store that does not answer. A process that works for the run waits, and says so
    (`store.waits`); one that only looks at the run does not.
    """

    uri: str
    cache: Path
    patience: float | None = None

    @cached_property
    def store(self) -> ObjectStore:
        """The run's storage."""
        return open_store(self.uri, self.patience)

    @cached_property
    def _creation(self) -> Entry:
        """The first entry of the run's log."""
        try:
            found = creation(self.store)
        except Missing:
            if self.store.exists("run.json"):  # where runs were described before they had a log
                raise self._of_another_version from None
            raise ConfigError(f"run {self.uri!r}: there is no such run; check the run id and store.uri") from None
        if getattr(found.body, "format", None) != FORMAT:
            raise self._of_another_version
        return found

    @property
    def _of_another_version(self) -> ConfigError:
        return ConfigError(f"run {self.uri!r} was written by another version of rollflow; use that one to read it")

    @property
    def created(self) -> RunCreated:
        """What the run was created as."""
        body = self._creation.body
        assert isinstance(body, RunCreated), "its format says so"
        return body

    @property
    def created_at(self) -> float:
        """Seconds since the epoch, by the clock of who prepared it."""
        return self._creation.at

    @property
    def run_id(self) -> str:
        """The run's name."""
        return checked(self.created.run_id, "run id")

    @cached_property
    def key(self) -> str:
        """The run's name among all runs of a cluster or a server: two runs of one name in two stores have two keys.

        An address alone is not enough: two services may each have a bucket of that name. So the time at which the run
        began counts, too. A folder gives the same key through whatever link it is reached.
        """
        local = self.store.local_path(entry_path(0))
        place = str(local.parent.parent.resolve()) if local else self.store.uri
        identity = json.dumps([place, self.created_at])
        return f"{self.run_id}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    @property
    def config(self) -> RunConfig:
        """The config in force, as far as this process has read the log.

        Raises:
            Corrupt: the recorded config is invalid.
        """
        return self._parsed(self.configs[-1])

    def config_at(self, version: int) -> RunConfig:
        """Return the config that `version` was trained under; for a version to come, the one in force."""
        return self._parsed(self.recorded_at(version))

    def recorded_at(self, version: int) -> RecordedConfig:
        """Return the config of `version` as it was recorded."""
        return self._config_of_entry(self.log.state.config_of(version))

    def config_under(self, claim: int) -> RunConfig:
        """Return the config that holds for the claim of entry `claim`: a later change ends the claim."""
        return self._parsed(self._config_of_entry(self.log.state.config_at(claim)))

    @property
    def all_configs(self) -> list[RunConfig]:
        """The parsed configs of the run; the first is the one that the run was created with."""
        return [self._parsed(recorded) for recorded in self.configs]

    @property
    def configs(self) -> list[RecordedConfig]:
        """All recorded configs of the run, as far as this process has read the log; the last one is in force.

        If the log does not fold, only those that can be read.
        """
        first = self._creation  # says which run is not there
        try:
            places = self.log.state.configs
        except Corrupt:
            return readable_configs(self.store) or [RecordedConfig.of(first)]
        return [self._config_of_entry(place.entry) for place in places]

    def _config_of_entry(self, n: int) -> RecordedConfig:
        if n not in self._configs:
            entry = self._creation if n == 0 else there(self.log, n).entry
            self._configs[n] = RecordedConfig.of(entry)
        return self._configs[n]

    @cached_property
    def _configs(self) -> dict[int, RecordedConfig]:
        """The configs by their entries."""
        return {}

    def _parsed(self, recorded: RecordedConfig) -> RunConfig:
        if recorded.entry not in self._trees:
            self._trees[recorded.entry] = self._parse(recorded)
        return self._trees[recorded.entry]

    @cached_property
    def _trees(self) -> dict[int, RunConfig]:
        """The parsed configs by their entries."""
        return {}

    def _parse(self, recorded: RecordedConfig) -> RunConfig:
        try:
            return RunConfig.model_validate(complete_config(recorded.config))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            where = f"{self.uri}/{entry_path(recorded.entry)}"
            raise Corrupt(f"{where} has an invalid config: {key}: {first['msg']}") from None

    @property
    def probe_tokens(self) -> list[int]:
        """The fixed tokens of the weight-update probe."""
        return list(self.created.probe_tokens)

    @cached_property
    def log(self) -> Log:
        """The run's log, as this process has read it: one view for all who ask."""
        return Log(self.store)

    @cached_property
    def policies(self) -> PolicyStore:
        """The run's versions."""
        return PolicyStore(self.log, in_use=self._waits_for_evaluation)

    @cached_property
    def batches(self) -> TrajectoryStore:
        """The run's trajectory batches."""
        return TrajectoryStore(self.log)

    def _waits_for_evaluation(self, version: int) -> bool:
        return self.evaluates(version) and not evaluated(self.store, version)

    def evaluates(self, version: int) -> bool:
        """Return whether `version` is to be evaluated: because its config says so, or as the last version."""
        return version == self.config.versions or self.config_at(version).evaluates(version)

    def evaluation_engine(self, *, on_cpu: bool) -> EngineConfig:
        """Return the engine that evaluates, if none is lent.

        On a CPU, "auto" puts the transformers engine in place of vLLM, unless it cannot run the policy.
        """
        config = self.config
        found = config.evaluation_engine(on_cpu=on_cpu) or config.engine
        replaced = config.evaluation.engine == "auto" and found != config.engine
        return config.engine if replaced and find_folder_hindrance(self.policy_folder) else found

    def weights(self, version: int) -> Path:
        """A folder on this node with the weights of a version; it stays until another version is asked for."""
        return self.policies.weights_folder(self.policies.find(version), self.cache / "weights")

    @cached_property
    def policy_folder(self) -> Path:
        """A folder on this node with the policy's config and tokenizer."""
        return self._policy("config", lambda path: not is_weights(path))

    @cached_property
    def first_weights(self) -> Path:
        """A folder on this node with the policy as the run began with it, the weights of `policy.path` included."""
        return self._policy("first", lambda path: True)

    def _policy(self, name: str, wanted: Callable[[str], bool]) -> Path:
        local = self.store.local_path("policy/config.json")
        if local is not None:
            return local.parent
        paths = [path for path in self.store.list("policy") if wanted(path)]

        def fetch(folder: Path) -> None:
            for path in paths:
                self.store.fetch(path, folder / Path(path).name)

        def whole(folder: Path) -> bool:
            return all((folder / Path(path).name).exists() for path in paths)

        return NodeCache(self.cache / "policies", self.key, self.patience).hold(name, fetch, whole).for_good()

    @cached_property
    def tokenizer(self) -> PolicyTokenizer:
        """The policy's tokenizer."""
        return PolicyTokenizer(self.policy_folder, self.created_at, single_start=self.created.single_start)

    def prompts(self) -> RunPrompts:
        """Open the run's prompts, as they were when it began, by the config that it began with.

        A prompt that is too long is replaced by another one, so the first `engine.max_new_tokens` is the one that
        counts.

        Raises:
            ConfigError: the prompts cannot be opened as they were: a package, or a file that the run did not keep, has
                changed.
            Corrupt: what the run kept of them is damaged.
        """
        pins = PINS.validate_python(self.created.prompts)
        config = self.all_configs[0]
        prompts = open_prompts(config, self.tokenizer, reader(self.store, config, pins), split_of(pins))
        check_asked(config, pins, prompts)
        return prompts

    def __getstate__(self) -> dict[str, Any]:
        """Only the address travels; the rest is read again where it is needed."""
        return {"uri": self.uri, "patience": self.patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=node_cache())


# Keys that are newer than some recorded runs, by section, with the values that match how those runs behaved.
BEFORE: dict[str, dict[str, Any]] = {
    "train": {
        "master_dtype": "policy",
        "share_prompts": False,
        "fused_adamw": False,
        "attention": "default",
        "advantage_dtype": "float32",
    },
    "reward": {"special_tokens": False},
}


def complete_config(recorded: Mapping[str, Any]) -> Mapping[str, Any]:
    """Complete a recorded config: a key that is newer than the run gets the value that matches how the run behaved."""
    sections = {name: recorded.get(name) for name in BEFORE}
    return {
        **recorded,
        **{name: {**BEFORE[name], **found} for name, found in sections.items() if isinstance(found, Mapping)},
    }


def claim(context: RunContext, role: Role, address: str, who: str = "") -> Writer:
    """Take a role of the run, in this process, on the cluster at `address`, from whoever had it.

    Raises:
        ConfigError: there is no such run.
        Deposed: the run has another supervisor now, on another cluster.
    """
    _ = context.created  # a run that does not exist is named as one
    host, process = socket.gethostname(), os.getpid()
    return context.log.claim(role, who=who or f"the {role}", cluster=address, host=host, process=process)


def open_prompts(
    config: RunConfig, tokenizer: PolicyTokenizer | None, read: Reader, split: Split = "key"
) -> RunPrompts:
    """The prompts a config describes; without a tokenizer only their texts."""
    longest = tokenizer.context - config.engine.max_new_tokens if tokenizer else 0
    encode = tokenizer.encode_prompt if tokenizer else None
    return RunPrompts(config.prompts, config.seed, config.evaluation.prompts, encode, longest, read, split)


def probe_tokens(prompts: RunPrompts, count: int) -> list[int]:
    """Return the first `count` tokens of demonstrations, enough to touch many rows of the embedding."""
    tokens: list[int] = []
    index = 0
    while len(tokens) < count:
        tokens.extend(prompts.demonstration(index)[0].tokens)
        index += 1
    return tokens[:count]
