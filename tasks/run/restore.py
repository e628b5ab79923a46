"""Restores a learner from storage, exactly to its state after it published a policy version.

    newest base with weights and state --> batch base --> base + 1 --> ... --> batch version - 1 --> version

If the state of a version is missing or damaged, the learner loads an earlier version and repeats the train steps after
it. Each replayed version is compared with the published version. A damaged object is restored if the replayed file has
the recorded hash.

Files are memory-mapped one after the other, so that memory contains the learner and at most one file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.deltas.chain import name_of
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.objects import Data
from rollflow.storage.objects.base import hash_pieces, split_buffers
from rollflow.storage.policies import MOVERS, PolicyStore, PolicyVersion
from rollflow.storage.records import StoredObject
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import WEIGHTS, Learner, LearnerStart
from rollflow.tasks.learners.checkpoint.sharded_files import GatheredFiles
from rollflow.tasks.learners.config import with_ranks
from rollflow.tasks.learners.distributed.rank_protocol import NEAR, RankHosts
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_switch import ConfigSwitchLearner, MappedFiles
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.node import node_cache


@dataclass(frozen=True, slots=True)
class ReplayedVersion:
    """A policy version that was trained again (replayed) from its stored batch. `differences` lists the files that
    differ from the published files."""

    version: PolicyVersion
    batch: BatchCommitted
    differences: tuple[str, ...]

    @property
    def same_weights(self) -> bool:
        """True if the replayed weights are equal to the published weights."""
        return not any(name.startswith(WEIGHTS) for name in self.differences)


@dataclass(slots=True)
class RestoredVersion:
    """Describes how a policy version was restored: from version `base`, by training `replayed` versions again."""

    base: int
    replayed: int = 0
    healed: list[str] = field(default_factory=list)  # paths of damaged objects that were restored
    differed: list[int] = field(default_factory=list)  # policy versions whose replay differs from the published files

    def sentence(self) -> str:
        """Return a sentence for the learner's status, or "" if nothing was replayed or restored."""
        said = [f"restored from version {self.base}"] if self.replayed else []
        said += [f"{self.replayed} replayed"] if self.replayed else []
        said += [f"{len(self.healed)} damaged objects restored"] if self.healed else []
        if self.differed:
            said.append(
                f"the replay of version {self.differed[0]} differs, so the learner continues with the published weights"
            )
        return ", ".join(said)


def new_learner(
    context: RunContext,
    folder: Path | None = None,
    *,
    blank: bool = False,
    ranks: RankHosts = NEAR,
    count: int | None = None,
) -> Learner:
    """Build the run's learner before its first train step, with the current config.

    `folder` contains the policy weights; without a folder, the weights are untrained. With `blank`, the weights are
    uninitialized, so that `restore` can load them. `ranks` specifies the GPUs or nodes of the training ranks. `count`
    replaces the number of training ranks in the config.
    """
    config = context.config

    def build(of: RunConfig, folder: Path | None, *, blank: bool) -> Learner:
        start = replace(start_of(context, folder, of), blank=blank, ranks=ranks if of == config else NEAR)
        train = of.train
        return build_learner(train if count in (None, train.ranks) else with_ranks(train, count), start)

    learner = build(config, folder, blank=blank)
    if len(context.configs) == 1:
        return learner
    return ConfigSwitchLearner(learner, config, context.config_at, lambda of: build(of, None, blank=True))


def start_of(context: RunContext, folder: Path | None = None, config: RunConfig | None = None) -> LearnerStart:
    """Return the values with which each rank of the run's learner starts; `config` defaults to the current config."""
    config = config or context.config
    return LearnerStart(
        folder or context.policy_folder,
        trained=folder is not None,
        dtype=config.policy.dtype,
        temperature=config.engine.temperature,
        versions=config.versions,
        longest=config.engine.max_new_tokens,
        seed=config.seed,
        shard_bytes=config.store.shard_bytes,
        # `first` is called only after a policy version was published, when the folder is complete.
        first=partial(getattr, context, "first_weights"),
    )


def restore(
    policies: PolicyStore,
    batches: TrajectoryStore,
    learner: Learner,
    version: int,
    *,
    heal: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> RestoredVersion:
    """Bring `learner` to its state after policy version `version`; with `heal`, also restore damaged objects.

    If replayed weights differ from the published weights, the published weights are used, and `differed` lists the
    version.

    Raises:
        Corrupt: the policy version can neither be read from storage nor trained again.
    """
    base, damaged = _load_base(policies, learner, version)
    found = RestoredVersion(base)
    for number in range(base + 1, version + 1):
        note(f"replaying version {number} of {version}")
        replayed = train_again(policies, batches, learner, number)
        found.replayed += 1
        if replayed.differences:
            found.differed.append(number)
        if not replayed.same_weights:
            _take_published(policies, learner, replayed.version)
        if heal and number in damaged:
            found.healed += _heal(policies, learner, damaged[number])
    return found


def train_again(policies: PolicyStore, batches: TrajectoryStore, learner: Learner, number: int) -> ReplayedVersion:
    """Repeat the train step to policy version `number` (>= 1); `learner` must be at the previous version.

    Raises:
        Corrupt: the stored batch of the policy version is damaged or missing.
    """
    version = policies.find(number)
    assert version.batch_entry is not None, "version 0 was not trained on a batch"
    batch = batches.read_commit(version.batch_entry)
    learner.step(TrajectoryBatch.from_bytes(batches.read(batch.file)), number - 1)
    return ReplayedVersion(version, batch, _differences(version, learner))


def _differences(version: PolicyVersion, learner: Learner) -> tuple[str, ...]:
    """Return the names of the learner's files that differ from the stored files of the policy version."""
    published = {name_of(o): o.sha256 for o in version.objects}
    made = {
        name: hash_pieces(split_buffers(data)) for name, data in list_files(learner, state=bool(version.state)).items()
    }
    return tuple(sorted(n for n in published.keys() | made.keys() if published.get(n) != made.get(n)))


def list_files(learner: Learner, *, state: bool = True) -> Mapping[str, Data]:
    """Return the files that the learner stores for a policy version, as a map from name to content.

    A sharded learner gathers the content of a file only when the file's name is looked up.
    """
    weights, rest = learner.weights(), learner.state() if state else {}
    return GatheredFiles([*weights, *rest], lambda name: weights[name] if name in weights else rest[name])


def _load_base(policies: PolicyStore, learner: Learner, version: int) -> tuple[int, dict[int, list[StoredObject]]]:
    """Load the newest intact policy version; return its number, and the damaged objects of newer versions."""
    damaged: dict[int, list[StoredObject]] = {}
    for base in range(version, -1, -1):
        found = policies.find(base)
        if not found.state and base < version:
            continue
        with (
            _local(policies, found.weights) as (weights, bad_weights),
            _local(policies, found.state) as (state, bad_state),
        ):
            if found.state and not bad_weights and not bad_state:
                learner.load(weights, state)
                return base, damaged
        is_newest, needed = base == version, policies.retention.is_needed
        damaged[base] = bad_weights if is_newest or needed("weights", base, version) else []
        damaged[base] += bad_state if is_newest or needed("state", base, version) else []
    lost = next((stored.path for objects in damaged.values() for stored in objects), "the learner's state")
    raise Corrupt(
        f"version {version} cannot be restored: {lost} is damaged or missing, and no earlier version has "
        "intact weights and an intact learner state"
    )


@contextmanager
def _local(policies: PolicyStore, objects: Sequence[StoredObject]) -> Iterator[tuple[MappedFiles, list[StoredObject]]]:
    """Yield the intact objects of a policy version as local files, and the list of the damaged objects."""
    (cache := node_cache()).mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="restore-", dir=cache) as folder:

        def path(stored: StoredObject) -> Path | None:
            try:
                return policies.file(stored, Path(folder))
            except Corrupt:
                return None

        with ThreadPoolExecutor(MOVERS) as pool:
            found = list(zip(objects, pool.map(path, objects), strict=True))
        intact = {name_of(stored): file for stored, file in found if file is not None}
        yield MappedFiles(intact), [stored for stored, file in found if file is None]


def _take_published(policies: PolicyStore, learner: Learner, version: PolicyVersion) -> None:
    """Load the published weights together with the optimizer state of the replay.

    Published weights have priority, because the log decides which weights a policy version has.
    """
    with _local(policies, version.weights) as (weights, damaged):
        if damaged:
            raise Corrupt(
                f"version {version.number} cannot be restored: {damaged[0].path} is damaged or missing, and a "
                "replay gives other weights; it may need the same kind of machine, number of threads and torch "
                "build"
            )
        learner.load(weights, dict(learner.state()))


def _heal(policies: PolicyStore, learner: Learner, damaged: Sequence[StoredObject]) -> list[str]:
    """Restore damaged objects that the replay reproduced byte for byte; return the paths of these objects."""
    made = list_files(learner)
    healed = []
    for stored in damaged:
        data = made[name_of(stored)]
        if hash_pieces(split_buffers(data)) == stored.sha256:
            policies.store.put(stored.path, data)
            healed.append(stored.path)
    return healed
