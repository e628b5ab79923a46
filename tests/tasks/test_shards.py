"""Tests the files in which weights are stored: they are ordinary safetensors files, equal tensors give equal bytes, and
they are written without a copy of the weights.
"""

from __future__ import annotations

import json
import weakref
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.deltas.chain import name_of
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects import open_store
from rollflow.storage.objects.base import split_buffers
from rollflow.storage.policies import PolicyStore
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.checkpoint.shards import NAMES, from_files, shapes_of, tensors_of, to_files
from rollflow.tasks.learners.config import CriticConfig, TorchTrain
from rollflow.tasks.learners.torch_learner import TorchLearner, load_model
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.policies.config import ColdStart
from rollflow.tasks.policies.folder import build_cold_folder
from rollflow.testing.learners import batch
from tests.support.described import describe
from tests.support.tiny_policy import make_policy, make_weights

SHAPES = st.lists(st.integers(0, 5), max_size=3)


def joined(files):  # type: ignore[no-untyped-def]
    return {name: b"".join(split_buffers(data)) for name, data in files.items()}


@given(
    named=st.dictionaries(st.text("abc.", min_size=1), st.tuples(st.sampled_from(sorted(NAMES)), SHAPES), min_size=1),
    shard_bytes=st.integers(1, 400),
    writable=st.booleans(),
)
@settings(deadline=None)
def test_stored_tensors_are_read_bit_for_bit(
    named: dict[str, tuple[str, list[int]]], shard_bytes: int, writable: bool
) -> None:
    """Tensors of every type and shape are read by the package safetensors and by `from_files`. Small tensors share a
    file.
    """
    tensors = {
        name: torch.randint(0, 2, (*shape, 8), dtype=torch.uint8).view(NAMES[kind])
        if shape
        else torch.ones((), dtype=NAMES[kind])
        for name, (kind, shape) in named.items()
    }
    files = joined(to_files("weights/model", tensors, shard_bytes))
    shards = {name: data for name, data in files.items() if name.endswith(".safetensors")}
    for data in shards.values():
        theirs = safetensors.torch.load(data)
        assert len(theirs) == 1 or sum(t.nbytes for t in theirs.values()) <= shard_bytes
    theirs = {name: tensor for data in shards.values() for name, tensor in safetensors.torch.load(data).items()}
    ours = from_files({name: memoryview(bytearray(data) if writable else data) for name, data in files.items()})
    for found in (theirs, ours):
        assert found.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].shape == tensor.shape
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    if len(shards) > 1:
        index = json.loads(files["weights/model.safetensors.index.json"])
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert {f"weights/{file}" for file in index["weight_map"].values()} == shards.keys()
        assert all(name in safetensors.torch.load(shards[f"weights/{f}"]) for name, f in index["weight_map"].items())
    else:
        assert [*files] == ["weights/model.safetensors"]


def test_pieces_of_weights_to_store_are_views_of_the_tensors() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    [parts] = to_files("model", {"a": tensor}).values()
    before = b"".join(parts)
    tensor.fill_(1.0)
    assert b"".join(parts) != before


class Buffer(bytearray):
    """A buffer that allows weak references."""


def test_weight_files_are_read_one_at_a_time() -> None:
    files = joined(to_files("model", {str(n): torch.full((8,), n) for n in range(5)}, 64))
    seen: list[weakref.ref[Buffer]] = []

    def read() -> Iterator[tuple[str, memoryview]]:
        for name, data in files.items():
            assert not any(one() for one in seen)
            buffer = Buffer(data)
            seen.append(weakref.ref(buffer))
            yield name, memoryview(buffer)
            del buffer

    deque(tensors_of(read()), maxlen=0)
    assert len(seen) == 6
    found = {name: (tensor.device.type, *tensor.shape) for name, tensor in shapes_of(files.items()).items()}
    assert found == {str(n): ("meta", 8) for n in range(5)}


@pytest.mark.parametrize("damage", [b"", b"abc", b"\xff" * 40, (5).to_bytes(8, "little") + b"[1,2]"])
def test_file_that_is_not_safetensors_is_reported_as_corrupt(damage: bytes) -> None:
    with pytest.raises(Corrupt, match="w is not a safetensors file"):
        from_files({"w": damage})


@pytest.mark.parametrize("uri", ["local", "memory://shards"])
def test_weights_in_several_files_are_read_by_transformers(uri: str, tmp_path: Path) -> None:
    """Transformers and another learner read the same bfloat16 policy from the published files."""
    for name, data in build_cold_folder(ColdStart(hidden_size=32, layers=2, heads=2), ["1 + 1 = 2"] * 10).items():
        (tmp_path / name).write_bytes(data)

    def learner(seed: int, *, trained: bool = False) -> TorchLearner:
        model = load_model(tmp_path, "bfloat16", trained=trained)
        return TorchLearner(model, TorchTrain(), temperature=1.0, versions=1, longest=1, seed=seed, shard_bytes=9000)

    made = learner(0)
    describe(run := open_store(str(tmp_path / "run") if uri == "local" else uri))
    store = PolicyStore(log := Log(run))
    log.claim("supervisor")
    writer = log.claim("learner")
    weights, state = (store.stage(writer, 0, files) for files in (made.weights(), made.state()))
    version = store.publish(writer, VersionPublished(0, None, weights, state))
    assert len(version.weights) > 3
    for file in (folder := store.weights_folder(version, tmp_path / "cache")).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert (folder / "model.safetensors.index.json").exists()
    again, other = learner(0, trained=True), learner(1)
    other.load(*({name_of(stored): store.read(stored) for stored in part} for part in (version.weights, version.state)))
    assert again.logprobs([3, 4, 5, 6]) == other.logprobs([3, 4, 5, 6]) == made.logprobs([3, 4, 5, 6])


class Held(bytearray):
    """The bytes of a file, with weak references, so that a test can find out whether they are still in use."""


@pytest.mark.long
def test_learner_frees_each_weight_file_before_the_next(tmp_path: Path) -> None:
    """A learner that loads several large files has only one file in memory at a time."""
    folder = make_weights(make_policy(tmp_path), seed=1)
    config = TorchTrain(objective=PartsObjective(kind="ppo"), critic=CriticConfig())
    made = TorchLearner.create(config, LearnerStart(folder, trained=True, versions=9, shard_bytes=2**14))
    made.step(batch(0), 0)
    weights, state = joined(made.weights()), joined(made.state())
    living: list[weakref.ref[Held]] = []

    def read(part: dict[str, bytes]) -> Iterator[tuple[str, Any]]:
        for name, data in part.items():
            assert not any(file() is not None for file in living), name
            file = Held(data)
            living.append(weakref.ref(file))
            given = [(name, memoryview(file))]
            del file
            yield given.pop()

    made.take(read(weights), read(state))
    assert len(living) == len(weights) + len(state) > 9
    assert joined(made.state()) == state
