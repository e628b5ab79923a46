"""Gives each process of a run access to storage, config, policy folder and prompts of the run.

A `RunContext` can be pickled; a process that unpickles it reads everything else from storage.
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
from rollflow.storage.log.reading import get_entry
from rollflow.storage.log.run_log import Log, Writer, read_creation, read_origin
from rollflow.storage.objects import ObjectStore, open_store
from rollflow.storage.objects.node_cache import NodeCache
from rollflow.storage.policies import PolicyStore
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.engines.config import EngineConfig
from rollflow.tasks.engines.runnable import find_folder_hindrance
from rollflow.tasks.policies.folder import is_weights
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.epochs import Epochs, skips_solved
from rollflow.tasks.prompts.held_out import Split
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.rollout.evaluation import is_evaluated
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.prompt_pins import PINS, check_asked, open_reader, split_of
from rollflow.tasks.runtime.names import run_id as checked
from rollflow.tasks.runtime.node import node_cache
from rollflow.tasks.runtime.renamed_keys import RECIPE

FORMAT = 5  # incremented when the format of any record changes, so that this release refuses runs of an older format


@dataclass(frozen=True)
class RunContext:
    """One run. `uri` is the address of the run's storage (`<store>/runs/<run id>`), and `cache` is a local folder for
    fetched files.

    `patience` is the number of seconds to wait for a store that does not answer.
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
        """The first entry of the run's log, which records how the run was created."""
        try:
            found = read_creation(self.store)
        except Missing:
            if self.store.exists("run.json"):  # a run of an older release has no log, but this file
                raise self._build_format_error(0, "") from None
            cure = "check the run id, or name its store (--store, ROLLFLOW_STORE)"
            raise ConfigError(f"run {self.uri!r}: there is no such run; {cure}") from None
        except Corrupt:
            self.check_format()
            raise
        body = found.body
        if not isinstance(body, RunCreated) or body.format != FORMAT:
            raise self._build_format_error(getattr(body, "format", 0), getattr(body, "code_version", ""))
        return found

    def check_format(self) -> None:
        """Check that this release of the program can read the stored run. A run whose first log entry is missing or
        damaged passes the check.

        Raises:
            ConfigError: another release of the program recorded the run, in another format.
        """
        origin = read_origin(self.store)
        if origin is not None and origin[0] != FORMAT:
            raise self._build_format_error(*origin)

    def _build_format_error(self, number: int, release: str) -> ConfigError:
        recorder = f"rollflow {release}, which recorded it" if release else "the release that recorded it"
        formats = f"has format {number}, and this release of rollflow reads format {FORMAT}"
        return ConfigError(f"run {self.uri!r} {formats}; use {recorder}")

    @property
    def created(self) -> RunCreated:
        """The first entry of the run's log, which records how the run was created."""
        body = self._creation.body
        assert isinstance(body, RunCreated), "entries of a run with this format must begin with its number"
        return body

    @property
    def created_at(self) -> float:
        """The run's time of creation, in seconds since the epoch, by the clock of the machine that created the run."""
        return self._creation.at

    @property
    def run_id(self) -> str:
        """The run's name."""
        return checked(self.created.run_id, "run id")

    @cached_property
    def key(self) -> str:
        """A name of the run that is unique on a cluster or server, even if runs in two stores have the same name.

        The key depends on the time of creation, because two storage services may have a bucket of the same name.
        Symbolic links to a local store do not change the key.
        """
        local = self.store.local_path(entry_path(0))
        place = str(local.parent.parent.resolve()) if local else self.store.uri
        identity = json.dumps([place, self.created_at])
        return f"{self.run_id}-{hashlib.sha256(identity.encode()).hexdigest()[:8]}"

    @property
    def config(self) -> RunConfig:
        """The current config of the run, as far as this process has read the log.

        Raises:
            Corrupt: the recorded config is invalid.
        """
        return self._get_parsed(self.configs[-1])

    def config_at(self, version: int) -> RunConfig:
        """Return the config with which a policy version was trained; for future versions, return the current config."""
        return self._get_parsed(self.recorded_at(version))

    def recorded_at(self, version: int) -> RecordedConfig:
        """Return the config of policy version `version` exactly as the run's log records it."""
        return self._config_of_entry(self.log.state.config_of(version))

    def config_under(self, claim: int) -> RunConfig:
        """Return the config that was current at log entry `claim`, the entry by which a process took its role."""
        return self._get_parsed(self._config_of_entry(self.log.state.config_at(claim)))

    @property
    def all_configs(self) -> list[RunConfig]:
        """All configs of the run, beginning with the first config."""
        return [self._get_parsed(recorded) for recorded in self.configs]

    @property
    def configs(self) -> list[RecordedConfig]:
        """All recorded configs of the run, as far as this process has read the log; the last config is the current
        config.

        If the log is damaged, the list has only the readable configs.
        """
        first = self._creation  # this line raises an error if there is no such run
        try:
            places = self.log.state.configs
        except Corrupt:
            return readable_configs(self.store) or [RecordedConfig.of(first)]
        return [self._config_of_entry(place.entry) for place in places]

    def _config_of_entry(self, n: int) -> RecordedConfig:
        if n not in self._configs:
            entry = self._creation if n == 0 else get_entry(self.log, n).entry
            self._configs[n] = RecordedConfig.of(entry)
        return self._configs[n]

    @cached_property
    def _configs(self) -> dict[int, RecordedConfig]:
        """The recorded configs of the run, keyed by the numbers of their log entries."""
        return {}

    def _get_parsed(self, recorded: RecordedConfig) -> RunConfig:
        if recorded.entry not in self._trees:
            self._trees[recorded.entry] = self._parse(recorded)
        return self._trees[recorded.entry]

    @cached_property
    def _trees(self) -> dict[int, RunConfig]:
        """The parsed configs of the run, keyed by the numbers of their log entries."""
        return {}

    def _parse(self, recorded: RecordedConfig) -> RunConfig:
        try:
            return parse_recorded(recorded.config)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(map(str, first["loc"]))
            where = f"{self.uri}/{entry_path(recorded.entry)}"
            raise Corrupt(f"{where} has an invalid config: {key}: {first['msg']}") from None

    @property
    def probe_tokens(self) -> list[int]:
        """The fixed tokens whose log-probs are compared between engine and learner after each weight update."""
        return list(self.created.probe_tokens)

    @cached_property
    def log(self) -> Log:
        """The log of the run; all callers in this process share one copy."""
        return Log(self.store)

    @cached_property
    def policies(self) -> PolicyStore:
        """The store of the run's policy versions."""
        return PolicyStore(self.log, in_use=self._waits_for_evaluation)

    @cached_property
    def batches(self) -> TrajectoryStore:
        """The store of the run's batches of trajectories."""
        return TrajectoryStore(self.log)

    def _waits_for_evaluation(self, version: int) -> bool:
        return self.evaluates(version) and not is_evaluated(self.store, version)

    def evaluates(self, version: int) -> bool:
        """Return whether policy version `version` is to be evaluated; the last version of a run always is."""
        return version == self.config.versions or self.config_at(version).evaluates(version)

    def evaluation_engine(self, *, on_cpu: bool) -> EngineConfig:
        """Return the config of the engine for evaluations. If evaluations borrow an engine, the result is the config of
        the run's engines.

        On a CPU, `evaluation.engine = "auto"` replaces vLLM by the transformers engine, if that engine supports the
        policy.
        """
        return choose_evaluation_engine(self.config, self.policy_folder, on_cpu=on_cpu)

    def weights(self, version: int) -> Path:
        """Return a local folder with the weights of a policy version, valid until another version is requested."""
        return self.policies.weights_folder(self.policies.find(version), self.cache / "weights")

    @cached_property
    def policy_folder(self) -> Path:
        """A local folder with the model config and the tokenizer of the policy."""
        return fetch_folder(self, "policy", "policies", "config", lambda path: not is_weights(path))

    @cached_property
    def first_weights(self) -> Path:
        """A local folder with the policy before training, including the weights of `policy.path`."""
        return fetch_folder(self, "policy", "policies", "first")

    @cached_property
    def tokenizer(self) -> PolicyTokenizer:
        """The policy's tokenizer."""
        return PolicyTokenizer(self.policy_folder, self.created_at, single_start=self.created.single_start)

    def prompts(self) -> RunPrompts:
        """Open the run's prompts with the run's first config, and check that the prompts are the same as at the
        start.

        Prompts that are too long for the policy are replaced by other prompts. The length limit comes from the run's
        first config, so that it never changes.

        Raises:
            ConfigError: a package, or a prompt file without a copy in the run's storage, has changed since the run
            began.
            Corrupt: the copy of a prompt file in the run's storage is damaged.
        """
        pins = PINS.validate_python(self.created.prompts)
        config = self.all_configs[0]
        prompts = open_prompts(config, self.tokenizer, open_reader(self.store, config, pins), split_of(pins))
        check_asked(config, pins, prompts)
        # Prompts depend on the log only in runs that skip solved questions.
        if any(map(skips_solved, config.prompts)):
            prompts.epochs = Epochs(self.log, config.prompts, prompts.sources)
        return prompts

    def __getstate__(self) -> dict[str, Any]:
        """Return only `uri` and `patience`; a process that unpickles the context reads everything else from storage."""
        return {"uri": self.uri, "patience": self.patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, cache=node_cache())


def choose_evaluation_engine(config: RunConfig, policy_folder: Path, *, on_cpu: bool) -> EngineConfig:
    """Return the config of the engine for evaluations of a policy, as `RunContext.evaluation_engine` specifies."""
    found = config.evaluation_engine(on_cpu=on_cpu) or config.engine
    replaced = config.evaluation.engine == "auto" and found != config.engine
    return config.engine if replaced and find_folder_hindrance(policy_folder) else found


def fetch_folder(
    context: RunContext, prefix: str, cache: str, name: str, wanted: Callable[[str], bool] = lambda path: True
) -> Path:
    """Return a local folder with the wanted files of a model. The run stores the model below the path `prefix`.

    If the storage is remote, the files are fetched into the folder `name` of the local cache `cache`.
    """
    store = context.store
    local = store.local_path(f"{prefix}/config.json")
    if local is not None:
        return local.parent
    paths = [path for path in store.list(prefix) if wanted(path)]

    def fetch(folder: Path) -> None:
        for path in paths:
            store.fetch(path, folder / Path(path).name)

    def whole(folder: Path) -> bool:
        return all((folder / Path(path).name).exists() for path in paths)

    return NodeCache(context.cache / cache, context.key, context.patience).hold(name, fetch, whole).for_good()


# Config keys that are newer than some recorded runs, with the values that match the behaviour of these runs.
BEFORE: dict[str, dict[str, Any]] = {
    "train": {
        "master_dtype": "policy",
        "share_prefixes": "none",
        "fused_adamw": False,
        "attention": "default",
        "advantage_dtype": "float32",
        "decayed": "all",
    },
    "reward": {"special_tokens": False, "judge_tries": 0},
    "evaluation": {"mean": "responses", "correct": "value"},
}


def parse_recorded(recorded: Mapping[str, Any]) -> RunConfig:
    """Parse a config that was read from a run's log.

    Keys that were renamed since the run get their present names. Keys that are missing in the record get the values
    that match the behaviour of the recorded run.

    Raises:
        ValidationError: the recorded config is invalid.
    """
    tree = translate_recorded(recorded)
    sections = {name: tree.get(name) for name in BEFORE}
    completed = {name: {**BEFORE[name], **found} for name, found in sections.items() if isinstance(found, Mapping)}
    return RunConfig.model_validate({**tree, **completed})


def translate_recorded(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recorded config with the present names of its keys, without values that never had an effect."""
    tree = RECIPE.apply(recorded)
    if _is_idle_admission(tree):
        tree["rollout"] = {**tree["rollout"], "admit_by": "slots"}
    return tree


def _is_idle_admission(tree: Mapping[str, Any]) -> bool:
    """Return whether a recorded config limits episodes of one turn by cache size, which never had an effect."""
    rollout, environment = tree.get("rollout"), tree.get("environment", {})
    if not (isinstance(rollout, Mapping) and isinstance(environment, Mapping)):
        return False
    return rollout.get("admit_by") == "kv" and environment.get("kind", "single-turn") == "single-turn"


def claim(context: RunContext, role: Role, address: str, who: str = "") -> Writer:
    """Claim a role of the run, such as the supervisor, for this process; the previous process loses the role.

    Raises:
        ConfigError: there is no such run.
        Deposed: a supervisor on another cluster has taken over the run.
    """
    _ = context.created  # this line raises an error if there is no such run
    host, process = socket.gethostname(), os.getpid()
    return context.log.claim(role, who=who or f"the {role}", cluster=address, host=host, process=process)


def open_prompts(
    config: RunConfig, tokenizer: PolicyTokenizer | None, read: Reader, split: Split = "key"
) -> RunPrompts:
    """Open the prompts that a config describes; without a tokenizer, only the texts of the prompts are available."""
    engine = config.engine
    longest = engine.limit_context(tokenizer.context) - engine.max_new_tokens if tokenizer else 0
    encode = tokenizer.encode_prompt if tokenizer else None
    return RunPrompts(config.prompts, config.seed, config.evaluation.prompts, encode, longest, read, split)


def probe_tokens(prompts: RunPrompts, count: int) -> list[int]:
    """Return the first `count` tokens of the example answers; these tokens use many rows of the embedding."""
    tokens: list[int] = []
    index = 0
    while len(tokens) < count:
        tokens.extend(prompts.demonstration(index)[0].tokens)
        index += 1
    return tokens[:count]
