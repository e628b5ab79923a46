"""Restore a learner from storage: exactly as it was after it published a version.

    newest base with weights and state --> batch base --> base + 1 --> ... --> batch version - 1 --> version

A version whose state was not stored, or whose objects are damaged, is trained again from an earlier one and the
batches its successors recorded. What comes out is compared with what was published: equal bytes replace damaged
objects under the names their manifest gives, so a restored run has again everything its ledger names.

Imports no torch: who only wants the learner's actor, or the replay's words, does not wait for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, Missing
from rollflow.storage.objects import Data
from rollflow.storage.objects.base import digest, pieces
from rollflow.storage.policies import MOVERS, Manifest, PolicyStore
from rollflow.storage.records import StoredObject
from rollflow.storage.trajectories import BatchCommit, TrajectoryStore
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.run import RunContext

if TYPE_CHECKING:
    from rollflow.tasks.learners.torch_learner import TorchLearner

WEIGHTS = "weights/"


@dataclass(frozen=True, slots=True)
class Replayed:
    """A version trained again. `differences` are the files that are not, byte for byte, what was published."""

    manifest: Manifest
    commit: BatchCommit
    differences: tuple[str, ...]

    @property
    def same_weights(self) -> bool:
        """Whether its weights are those that were published."""
        return not any(name.startswith(WEIGHTS) for name in self.differences)


@dataclass(slots=True)
class Restored:
    """How a version was restored: from `base`, by training `replayed` versions again."""

    base: int
    replayed: int = 0
    healed: list[str] = field(default_factory=list)  # objects that were damaged and are there again
    differed: list[int] = field(default_factory=list)  # versions whose replay differs from what was published

    def sentence(self) -> str:
        """For the learner's note; empty where nothing had to be done again."""
        said = [f"restored from version {self.base}"] if self.replayed else []
        said += [f"{self.replayed} replayed"] if self.replayed else []
        said += [f"{len(self.healed)} damaged objects made again"] if self.healed else []
        if self.differed:
            said.append(f"the replay of version {self.differed[0]} differs: went on with the published weights")
        return ", ".join(said)


def new_learner(context: RunContext, folder: Path | None = None) -> TorchLearner:
    """The run's learner before its first step: `folder`'s weights, or, without one, an untrained policy."""
    with _quick_imports():
        import torch

        from rollflow.tasks.learners.torch_learner import TorchLearner, load_model

        config = context.config
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        model = load_model(folder or context.policy_folder, config.policy.dtype, trained=folder is not None)
    return TorchLearner(
        model,
        config.train,
        temperature=config.engine.temperature,
        versions=config.versions,
        seed=config.seed,
        shard_bytes=config.store.shard_bytes,
    )


@contextmanager
def _quick_imports() -> Iterator[None]:
    """A learner's start is mostly imports; a run whose learner died waits for them.

    What is imported stays, so looking for garbage in it is lost time; and only other models' losses and decoding
    need scikit-learn and SciPy.
    """
    gc.disable()
    try:
        import transformers.utils

        transformers.utils.is_sklearn_available = transformers.utils.is_scipy_available = lambda: False
        yield
    finally:
        gc.enable()


def base_of(policies: PolicyStore, version: int) -> int:
    """The newest version up to `version` whose weights and learner state are in storage.

    Raises:
        Corrupt: there is none.
    """
    for base in range(version, -1, -1):
        manifest = policies.manifest(base)
        if manifest.learner and all(policies.run.exists(o.path) for o in (*manifest.weights, *manifest.learner)):
            return base
    raise Corrupt(f"no version up to {version} has its weights and learner state in storage any more")


def restore(
    policies: PolicyStore,
    batches: TrajectoryStore,
    learner: Learner,
    version: int,
    *,
    heal: bool = False,
    note: Callable[[str], None] = lambda _: None,
) -> Restored:
    """Bring `learner` to where it was after publishing `version`; with `heal`, put back the damaged objects.

    A replay that differs from published weights goes on with the published ones and says so.

    Raises:
        Corrupt: the version can neither be read nor rebuilt.
    """
    base, damaged = _load_base(policies, learner, version)
    found = Restored(base)
    for number in range(base + 1, version + 1):
        note(f"replaying version {number} of {version}")
        replayed = train_again(policies, batches, learner, number)
        found.replayed += 1
        if replayed.differences:
            found.differed.append(number)
        if not replayed.same_weights:
            _take_published(policies, learner, replayed.manifest)
        if heal and number in damaged:
            found.healed += _heal(policies, learner, damaged[number])
    return found


def train_again(policies: PolicyStore, batches: TrajectoryStore, learner: Learner, version: int) -> Replayed:
    """One recorded train step: `learner`, restored to the version before, becomes `version`.

    Raises:
        Corrupt: the batch is damaged, or is not the one the version was trained on.
    """
    manifest = policies.manifest(version)
    try:
        commit, data = batches.read(version - 1)
    except Missing as error:
        raise Corrupt(f"batch {version - 1}, which version {version} was trained on, is missing") from error
    if manifest.batch != batches.commit_sha256(version - 1):
        raise Corrupt(f"batch {version - 1} is not the one version {version} was trained on; see `rollflow audit`")
    learner.step(TrajectoryBatch.from_bytes(data), version - 1)
    return Replayed(manifest, commit, _differences(manifest, learner))


def _differences(manifest: Manifest, learner: Learner) -> tuple[str, ...]:
    """Files of the learner that are not those of the manifest; state is compared only where it was stored."""
    published = {name_of(o): o.sha256 for o in (*manifest.weights, *manifest.learner)}
    made = {name: digest(pieces(data)) for name, data in files(learner, state=bool(manifest.learner)).items()}
    return tuple(sorted(n for n in published.keys() | made.keys() if published.get(n) != made.get(n)))


def files(learner: Learner, *, state: bool = True) -> dict[str, Data]:
    """What a version stores: name -> content."""
    return {**learner.weights(), **(learner.state() if state else {})}


def name_of(stored: StoredObject) -> str:
    """The name under which an object was staged (`policies/<version>/<writer>/<name>`)."""
    return stored.path.split("/", 3)[3]


def _load_base(policies: PolicyStore, learner: Learner, version: int) -> tuple[int, dict[int, list[StoredObject]]]:
    """Load the newest version that can be; returns it, and the damaged objects of the ones that cannot."""
    damaged: dict[int, list[StoredObject]] = {}
    for base in range(version, -1, -1):
        manifest = policies.manifest(base)
        if not manifest.learner and base < version:
            continue
        weights, bad_weights = _read(policies, manifest.weights)
        state, bad_state = _read(policies, manifest.learner)
        if manifest.learner and not bad_weights and not bad_state:
            learner.load(weights, state)
            return base, damaged
        if base == version or policies.retention.needed(base, version):
            damaged[base] = bad_weights + bad_state
    raise Corrupt(
        f"version {version} cannot be restored: {damaged[version][0].path} is damaged or missing, "
        "and no earlier version has intact weights and learner state"
    )


def _read(policies: PolicyStore, objects: Sequence[StoredObject]) -> tuple[dict[str, Data], list[StoredObject]]:
    """The intact ones by name, and the damaged or missing ones."""

    def content(stored: StoredObject) -> Data | None:
        try:
            return policies.read(stored)
        except Corrupt:
            return None

    with ThreadPoolExecutor(MOVERS) as pool:
        found = list(zip(objects, pool.map(content, objects), strict=True))
    intact = {name_of(stored): data for stored, data in found if data is not None}
    return intact, [stored for stored, data in found if data is None]


def _take_published(policies: PolicyStore, learner: Learner, manifest: Manifest) -> None:
    """The ledger decides what a version is: its weights, with the optimizer state of the replay."""
    weights, damaged = _read(policies, manifest.weights)
    if damaged:
        raise Corrupt(
            f"version {manifest.version} cannot be restored: {damaged[0].path} is damaged or missing, and its replay "
            "gives other weights; was it trained on another kind of machine, with other threads or another torch build?"
        )
    learner.load(weights, learner.state())


def _heal(policies: PolicyStore, learner: Learner, damaged: Sequence[StoredObject]) -> list[str]:
    """Put back what the replay made again, byte for byte; returns the paths."""
    made: Mapping[str, Data] = files(learner)
    healed = []
    for stored in damaged:
        data = made[name_of(stored)]
        if digest(pieces(data)) == stored.sha256:
            policies.run.put(stored.path, data)
            healed.append(stored.path)
    return healed
