"""How far a version that was trained again is from what was published: tensor by tensor, a file at a time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollflow.storage.objects.base import Data
from rollflow.storage.policies import PolicyStore
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.learners.restore import Replayed, files, name_of
from rollflow.tasks.learners.shards import tensors_of

NEAR = 1e-5  # that sums in another order are apart after a step
STEPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # from one number of a type to the next, over the number


@dataclass(frozen=True, slots=True)
class Distance:
    """Of what was made and what was published."""

    most: float = 0.0  # the largest difference of two numbers
    near: bool = True  # whether all are within `NEAR`, and, of a short type, a step of that type

    def plus(self, other: Distance) -> Distance:
        """Of both together."""
        return Distance(max(self.most, other.most), self.near and other.near)


FAR = Distance(float("inf"), near=False)  # of what has other tensors


def distance(policies: PolicyStore, learner: Learner, replayed: Replayed) -> Distance:
    """Of the files that differ; `Corrupt` where one is not in storage any more."""
    version, found = replayed.version, Distance()
    made, published = files(learner, state=bool(version.state)), {name_of(o): o for o in version.objects}
    if made.keys() != published.keys():
        return FAR
    for name in replayed.differences:
        found = found.plus(distance_of_files(name, made[name], policies.read(published[name])))
    return found


def distance_of_files(name: str, made: Data, published: Data) -> Distance:
    """Of two safetensors files of one name."""
    ours, theirs = dict(tensors_of([(name, made)])), dict(tensors_of([(name, published)]))
    if ours.keys() != theirs.keys():
        return FAR
    found = Distance()
    for key, tensor in ours.items():
        found = found.plus(_of_tensor(tensor, theirs[key]))
    return found


def _of_tensor(ours: Tensor, theirs: Tensor) -> Distance:
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return FAR
    if not ours.numel():
        return Distance()
    if not ours.is_floating_point():
        return Distance() if torch.equal(ours, theirs) else FAR
    apart = (ours.double() - theirs.double()).abs()
    within = NEAR + STEPS.get(ours.dtype, 0.0) * theirs.double().abs()
    return Distance(float(apart.max()), bool((apart <= within).all()))
