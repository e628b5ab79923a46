"""How far a replayed version is from what was published: tensor by tensor, a file at a time.

Rounding is short beside what the step changed, whatever the learning rate is. AdamW makes much of it in single numbers,
whose gradients are nearly zero; so lengths are compared, of all tensors of a kind together:

    |made - published| <= share * |published - parent|

A single number is short beside all others. It may be no further away than the step moved any of its kind, there and
back, beyond the step of its type. A number that is not finite has no distance: both
sides have it, or the two are far apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.base import Data
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.records import StoredObject
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.learners.restore import Replayed, files, name_of
from rollflow.tasks.learners.shards import tensors_of

SHARE = 0.1  # of what a step changed; gradients in bfloat16 take 0.02 of it
SHORT = 0.5  # the same, of what is rounded to a short type, where most weights stay and chance moves others a step
ALIKE = 2.0**-23  # of what is there: a step of float32, which rounding may always be
STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # likewise, of shorter types
TURNED = 2.0  # of the most that a step moved a number: the other sign, where a gradient is nearly zero


@dataclass(frozen=True, slots=True)
class Kind:
    """Of all tensors of a kind: squares of lengths, and the most of single numbers."""

    apart: float
    allowed: float
    furthest: float  # beyond the step of the type
    moved: float  # by the step

    @property
    def near(self) -> bool:
        """Whether it is rounding."""
        return self.apart <= self.allowed and self.furthest <= TURNED * self.moved

    def plus(self, other: Kind) -> Kind:
        """Of both together."""
        most = max(self.furthest, other.furthest), max(self.moved, other.moved)
        return Kind(self.apart + other.apart, self.allowed + other.allowed, *most)


@dataclass(frozen=True, slots=True)
class Distance:
    """Of what was made and what was published, by kind of tensor."""

    most: float = 0.0  # the largest difference of two numbers
    kinds: Mapping[str, Kind] = field(default_factory=dict)

    @property
    def near(self) -> bool:
        """Whether it is rounding."""
        return all(kind.near for kind in self.kinds.values())

    def plus(self, other: Distance) -> Distance:
        """Of both together."""
        kinds = {**self.kinds, **other.kinds}
        kinds |= {name: self.kinds[name].plus(other.kinds[name]) for name in self.kinds.keys() & other.kinds.keys()}
        return Distance(max(self.most, other.most), kinds)


FAR = Distance(float("inf"), {"": Kind(1.0, 0.0, 0.0, 0.0)})  # of what has other tensors


def distance(policies: PolicyStore, learner: Learner, replayed: Replayed) -> Distance:
    """Of the files that differ; `Corrupt` where one is not in storage any more."""
    version, found = replayed.version, Distance()
    made, published = files(learner, state=bool(version.state)), _by_name(version)
    if made.keys() != published.keys():
        return FAR
    before = _by_name(policies.find(version.number - 1))
    for name in replayed.differences:
        given = made[name], policies.read(published[name]), _read(policies, before.get(name))
        found = found.plus(distance_of_files(name, *given))
    return found


def distance_of_files(name: str, made: Data, published: Data, parent: Data | None = None) -> Distance:
    """Of two safetensors files of one name; what the parent's has not was zero there, as moments are at first."""
    ours, theirs = (dict(tensors_of([(name, data)])) for data in (made, published))
    before = dict(tensors_of([(name, parent)])) if parent is not None else {}
    if ours.keys() != theirs.keys():
        return FAR
    found, stem = Distance(), name.partition(".")[0].partition("-")[0]
    for key, tensor in ours.items():
        kind = f"{stem}/{key.rpartition('/')[0]} {tensor.dtype}"
        found = found.plus(_of_tensor(kind, tensor, theirs[key], before.get(key)))
    return found


def _of_tensor(kind: str, ours: Tensor, theirs: Tensor, before: Tensor | None) -> Distance:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return FAR
    if not ours.is_floating_point():
        return Distance() if torch.equal(ours, theirs) else FAR
    odd = ~(ours.isfinite() & theirs.isfinite())
    if odd.any():
        if not ((ours == theirs) | (ours.isnan() & theirs.isnan()))[odd].all():
            return FAR
        ours, theirs, before = ours[~odd], theirs[~odd], None if before is None else before[~odd]
    if before is not None and not (known := before.isfinite()).all():
        ours, theirs, before = ours[known], theirs[known], before[known]
    if not ours.numel():
        return Distance()
    share, published = SHARE if ours.element_size() > 2 else SHORT, theirs.double()
    apart = ours.double() - published
    changed = published if before is None else published - before.double()
    beyond = apart.abs() - STEPS.get(ours.dtype, ALIKE) * published.abs()
    allowed = share**2 * _square(changed) + ALIKE**2 * _square(published)
    found = Kind(_square(apart), allowed, float(beyond.max()), float(changed.abs().max()))
    return Distance(float(apart.abs().max()), {kind: found})


def _square(tensor: Tensor) -> float:
    """Of its length."""
    return float(tensor.square().sum())


def _by_name(version: PolicyVersion) -> dict[str, StoredObject]:
    return {name_of(stored): stored for stored in version.objects}


def _read(policies: PolicyStore, stored: StoredObject | None) -> Data | None:
    """Of the parent; None where it is not in storage."""
    try:
        return None if stored is None else policies.read(stored)
    except Corrupt:
        return None
