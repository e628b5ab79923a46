"""Makes weights for tests of deltas: safetensors files with bfloat16 numbers, few of which change from version to
version.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rollflow.storage.deltas.parent import ParentWeights
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Writer
from rollflow.storage.objects.base import Data
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.tasks.learners.checkpoint.sharded_files import copy_parent, stage_weights
from tests.support.batches import scheduling, staged

Tensors = Mapping[str, tuple[str, NDArray[np.unsignedinteger]]]  # name -> data type, bits of the elements


def safetensors(tensors: Tensors) -> list[memoryview]:
    """Return a safetensors file as a learner does: a buffer for the header, and one for each tensor."""
    told, end = dict[str, object](), 0
    for name, (kind, values) in tensors.items():
        told[name] = {"dtype": kind, "shape": [len(values)], "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    header = json.dumps(told).encode()
    parts = [len(header).to_bytes(8, "little") + header, *(values.tobytes() for _, values in tensors.values())]
    return [memoryview(part) for part in parts]


def nudged(draw: np.random.Generator, values: NDArray[np.unsignedinteger], share: float) -> NDArray[np.unsignedinteger]:
    """Change a share of the elements, most of them by one step up or down."""
    steps = np.where(draw.random(len(values)) < 0.9, draw.choice([1, -1], len(values)), draw.integers(2**15))
    chosen = draw.random(len(values)) < share
    return (values + np.where(chosen, steps, 0).astype(values.dtype)).astype(values.dtype)


class DriftingWeights:
    """Weights in two files and an index, of which a few elements change from version to version."""

    def __init__(self, seed: int = 0, share: float = 0.02) -> None:
        self._draw, self._share = np.random.default_rng(seed), share
        self.files: dict[str, bytes] = {}  # the newest version's files
        bits = self._draw.normal(0, 0.02, 3000).astype(np.float32).view("<u4")
        self._tensors = {
            "weights/model-1.safetensors": {"a": ("BF16", (bits >> 16).astype("<u2")), "b": ("F32", bits[:300])},
            "weights/model-2.safetensors": {"c": ("BF16", (bits[::-1] >> 16).astype("<u2"))},
        }
        self._set_files()

    def move(self, *, far: bool = False) -> None:
        """Compute the next version's files; with `far`, all elements of the second file change."""
        for name, tensors in self._tensors.items():
            share = 1.0 if far and name.endswith("2.safetensors") else self._share
            self._tensors[name] = {key: (kind, nudged(self._draw, v, share)) for key, (kind, v) in tensors.items()}
        self._set_files()

    def _set_files(self) -> None:
        made: dict[str, bytes] = {name: b"".join(safetensors(tensors)) for name, tensors in self._tensors.items()}
        self.files = made | {"weights/model.index.json": b'{"a": "model-1", "b": "model-1", "c": "model-2"}'}


def publish_weights(
    policies: PolicyStore, writer: Writer, files: Mapping[str, Data], parent: ParentWeights, number: int
) -> PolicyVersion:
    """Publish version `number` with these weight files, as a learner does."""
    stored = stage_weights(policies, writer, number, files, parent)
    stateful = policies.log.state.retention.stores_state(number)
    state = policies.stage(writer, number, {"learner/state.safetensors": b"state %d" % number} if stateful else {})
    batch = policies.log.state.waiting[number - 1].entry if number else None
    body = VersionPublished(number, batch, stored.weights, state, deltas=stored.deltas)
    return policies.publish(writer, body)


def train_weights(
    policies: PolicyStore, writer: Writer, weights: DriftingWeights, parent: ParentWeights, versions: int
) -> Sequence[Mapping[str, bytes]]:
    """Publish this many more versions, each on its own batch; return the files of each of these versions."""
    batches, scheduler = scheduling(policies.store)
    made = []
    for number in range(first := policies.newest() + 1, first + versions):
        if number:
            batches.commit(scheduler, staged(number - 1, number - 1))
            weights.move()
        policies.newest()
        publish_weights(policies, writer, weights.files, parent, number)
        made.append(weights.files)
    return made


def restored_parent(policies: PolicyStore) -> ParentWeights:
    """Return the parent's weights as a learner that restarts reads them."""
    parent, newest = ParentWeights(policies.retention.full_every), policies.newest()
    if newest >= 0:
        weights = policies.find(newest).weights
        files = {stored.path.split("/", 3)[3]: bytes(policies.read(stored)) for stored in weights}
        copy_parent(parent, newest, lambda: files, weights)
    return parent
