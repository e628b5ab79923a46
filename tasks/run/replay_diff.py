"""Measures how much a replayed policy version (a version that was trained again) differs from the published version.

Tensors of one kind, such as all float32 weights, are compared together by L2 norms, because AdamW can enlarge the
rounding errors of single weights.

    |replayed - published| <= share * |published - parent|

Single elements have a bound of their own, because one element hardly changes a norm. A NaN or an infinity must be equal
in both versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollflow.storage.deltas.chain import name_of
from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import Data
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.records import StoredObject
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.learners.checkpoint.shards import tensors_of
from rollflow.tasks.run.restore import ReplayedVersion, list_files

# largest accepted L2 norm of the difference between replayed and published tensors, relative to the L2 norm of the
# change by the train step
SHARE = 0.1
# SHARE for weights in bfloat16 and float16, whose changes in one step are mostly rounding
SHORT = 0.5
ALIKE = 2.0**-23  # relative rounding step of float32; a difference of this size is always accepted
STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # data type -> relative rounding step
# largest accepted difference of an element, as a multiple of the step's largest change of an element
TURNED = 2.0


@dataclass(frozen=True, slots=True)
class Kind:
    """The distance between replayed and published tensors of one kind; `apart` and `allowed` are squared L2 norms."""

    apart: float
    allowed: float
    furthest: float  # largest difference of an element beyond the rounding step of its data type
    moved: float  # largest change of an element by the train step that is replayed

    @property
    def near(self) -> bool:
        """True if rounding explains the difference between the replayed and the published tensors."""
        return self.apart <= self.allowed and self.furthest <= TURNED * self.moved

    def combine(self, other: Kind) -> Kind:
        """Return the combined distance over the tensors of two `Kind` objects."""
        most = max(self.furthest, other.furthest), max(self.moved, other.moved)
        return Kind(self.apart + other.apart, self.allowed + other.allowed, *most)


@dataclass(frozen=True, slots=True)
class ReplayDistance:
    """The distance between a replayed and a published policy version, for each kind of tensor."""

    most: float = 0.0  # largest difference between a replayed and a published element
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def near(self) -> bool:
        """True if rounding explains the difference between the replayed and the published policy version."""
        return all(kind.near for kind in self.kinds.values())

    def combine(self, other: ReplayDistance) -> ReplayDistance:
        """Return the combined distance over the files of two `ReplayDistance` objects."""
        kinds = {**self.kinds, **other.kinds}
        kinds |= {name: self.kinds[name].combine(other.kinds[name]) for name in self.kinds.keys() & other.kinds.keys()}
        return ReplayDistance(max(self.most, other.most), kinds)


FAR = ReplayDistance(float("inf"), {"": Kind(1.0, 0.0, 0.0, 0.0)})  # the distance between files with different tensors


def measure_distance(policies: PolicyStore, learner: Learner, replayed: ReplayedVersion) -> ReplayDistance:
    """Return the distance over all replayed files that differ from the published files; raise `Corrupt` if a file is
    missing."""
    version, found = replayed.version, ReplayDistance()
    made, published = list_files(learner, state=bool(version.state)), _by_name(version)
    if made.keys() != published.keys():
        return FAR
    before = _by_name(policies.find(version.number - 1))
    for name in replayed.differences:
        given = made[name], policies.read(published[name]), _read(policies, before.get(name))
        found = found.combine(distance_of_files(name, *given))
    return found


def distance_of_files(name: str, made: Data, published: Data, parent: Data | None = None) -> ReplayDistance:
    """Return the distance between two safetensors files of the same name.

    A tensor that is missing in the parent version counts as zero, because the optimizer's moments start at zero.
    """
    ours, theirs = (dict(tensors_of([(name, data)])) for data in (made, published))
    before = dict(tensors_of([(name, parent)])) if parent is not None else {}
    if ours.keys() != theirs.keys():
        return FAR
    found, stem = ReplayDistance(), name.partition(".")[0].partition("-")[0]
    for key, tensor in ours.items():
        kind = f"{stem}/{key.rpartition('/')[0]} {tensor.dtype}"
        found = found.combine(_of_tensor(kind, tensor, theirs[key], before.get(key)))
    return found


def _of_tensor(kind: str, ours: Tensor, theirs: Tensor, before: Tensor | None) -> ReplayDistance:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return FAR
    if not ours.is_floating_point():
        return ReplayDistance() if torch.equal(ours, theirs) else FAR
    odd = ~(ours.isfinite() & theirs.isfinite())
    if odd.any():
        if not ((ours == theirs) | (ours.isnan() & theirs.isnan()))[odd].all():
            return FAR
        ours, theirs, before = ours[~odd], theirs[~odd], None if before is None else before[~odd]
    if before is not None and not (known := before.isfinite()).all():
        ours, theirs, before = ours[known], theirs[known], before[known]
    if not ours.numel():
        return ReplayDistance()
    share, published = SHARE if ours.element_size() > 2 else SHORT, theirs.double()
    apart = ours.double() - published
    changed = published if before is None else published - before.double()
    beyond = apart.abs() - STEPS.get(ours.dtype, ALIKE) * published.abs()
    allowed = share**2 * _square(changed) + ALIKE**2 * _square(published)
    found = Kind(_square(apart), allowed, float(beyond.max()), float(changed.abs().max()))
    return ReplayDistance(float(apart.abs().max()), {kind: found})


def _square(tensor: Tensor) -> float:
    """Return the square of the tensor's L2 norm."""
    return float(tensor.square().sum())


def _by_name(version: PolicyVersion) -> dict[str, StoredObject]:
    return {name_of(stored): stored for stored in version.objects}


def _read(policies: PolicyStore, stored: StoredObject | None) -> Data | None:
    """Read a stored object of the parent version; return None if the object is damaged or missing."""
    try:
        return None if stored is None else policies.read(stored)
    except Corrupt:
        return None
