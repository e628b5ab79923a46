"""Tests that runs that store weights as deltas have the same weights as other runs, in stores and in engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rollflow.storage.audit.audit import audit
from rollflow.storage.deltas.chain import name_of
from rollflow.storage.deltas.parent import ParentWeights
from rollflow.storage.errors import Corrupt
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore
from rollflow.tasks.engines.config import TransformersEngineConfig, VllmEngineConfig
from rollflow.tasks.engines.fixed_shape import FixedShapeSampler
from rollflow.tasks.engines.transformers import TransformersEngine
from rollflow.tasks.engines.vllm.engine import VllmEngine
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of
from tests.support.batches import begin, learning, scheduling, staged
from tests.support.delta_weights import publish_weights
from tests.support.small_run import ALL_ROLES, prepare_small, train_small
from tests.support.tiny_policy import make_policy, make_weights
from tests.tasks.test_restore import hashes, restored

Prepare = Callable[..., RunContext]
VERSIONS = 6
TRAINS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "roles": ALL_ROLES,
    "ranks": {"ranks": 2},
    "lora": {"lora": {"rank": 2}},
    "sharded": {"ranks": 2, "sharded": True},
}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """Return a function that prepares a run of a bfloat16 policy. A train step changes only a few of its weights."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))

    def prepared(run_id: str, full_every: int, train: Mapping[str, Any] | None = None, **store: object) -> RunContext:
        keys = {"learning_rate": 1e-6, **(train or {})}
        kept = {"keep_last": 10, "full_every": full_every, **store}
        return prepare_small(tmp_path, run_id, train=keys, dtype="bfloat16", **kept)

    return prepared


def weights(context: RunContext, version: int) -> dict[str, str]:
    return {name_of(one).rpartition("/")[2]: one.sha256 for one in context.policies.find(version).weights}


def with_deltas(context: RunContext) -> list[int]:
    """Return the versions that are stored as deltas."""
    return [number for number in range(VERSIONS + 1) if context.policies.find(number).deltas]


@pytest.mark.parametrize("train", [pytest.param(keys, id=name) for name, keys in TRAINS.items()])
def test_weights_are_the_same_with_and_without_deltas(small: Prepare, train: Mapping[str, Any]) -> None:
    """A sharded learner stores no deltas, but all weights."""
    whole, context = small("whole", 1, train), small("deltas", 4, train)
    for one in (whole, context):
        train_small(one)
    assert with_deltas(whole) == []
    assert with_deltas(context) == ([] if train.get("sharded") else [1, 2, 3, 5, 6])
    for version in range(VERSIONS + 1):
        assert weights(context, version) == weights(whole, version)
        assert hashes(restored(context, version)[0]) == hashes(restored(whole, version)[0])
    report = audit(context.store, deep=True, expected=expected_of(context))
    assert (report.violations, report.unchecked) == ([], "")


def test_learner_that_dies_and_restarts_publishes_deltas(small: Prepare) -> None:
    whole, broken = small("whole", 4), small("broken", 4, state_every=3)
    train_small(whole)
    for until in (0, 2, 3, 5):
        train_small(broken, until)
    assert train_small(broken).version == VERSIONS
    assert with_deltas(broken) == with_deltas(whole) == [1, 2, 3, 5, 6]
    for version in range(VERSIONS + 1):
        assert weights(broken, version) == weights(whole, version)
    assert audit(broken.store, deep=True).clean


def test_damaged_delta_is_replaced_by_training_again(small: Prepare) -> None:
    """The learner stores the whole file. Readers and the audit accept it in place of the delta."""
    context = small("small", 10)
    train_small(context, 4)
    version = context.policies.find(4)
    before = hashes(restored(context, 4)[0])
    context.store.put(version.deltas[0].path, b"damaged")
    assert not audit(context.store, deep=True).clean
    with pytest.raises(Corrupt):
        context.policies.read(version.weights[0])
    actor = train_small(context)
    assert actor.restored is not None
    assert (actor.restored.base, actor.restored.healed) == (3, [version.weights[0].path])
    assert hashes(restored(context, 4)[0]) == before
    assert audit(context.store, deep=True).clean
    assert with_deltas(context) == [1, 2, 3, 4, 5, 6]


def bits(sampler: FixedShapeSampler) -> dict[str, list[int]]:
    return {n: p.detach().view(torch.int16).flatten().tolist() for n, p in sampler._model.named_parameters()}


@pytest.mark.parametrize("steps", [(1, 2, 3), (1, 3), (2, 3), (3, 5), (3, 1)])
def test_transformers_engine_loads_only_changed_elements(
    small: Prepare, monkeypatch: pytest.MonkeyPatch, steps: tuple[int, ...]
) -> None:
    """The engine may skip versions. It loads all elements of a version that is stored whole, or that is older."""
    context = small("small", 4)
    train_small(context)
    engines = [FixedShapeSampler(context.policy_folder, torch.bfloat16, 4, ()) for _ in range(2)]
    whole: list[Path] = []
    load = FixedShapeSampler._load_all
    monkeypatch.setattr(FixedShapeSampler, "_load_all", lambda self, f: (whole.append(f), load(self, f))[1])
    engines[0].load(context.weights(first := steps[0]))
    whole.clear()
    for before, after in zip((first, *steps[1:]), steps[1:], strict=False):
        engines[0].load(folder := context.weights(after), before, after)
        assert bool(whole) == (not before < after or after // 4 > before // 4)
        engines[1].load(folder)
        assert bits(engines[0]) == bits(engines[1])
        whole.clear()


async def test_engine_whose_update_failed_loads_all_weights(small: Prepare, tmp_path: Path) -> None:
    context = small("small", 10)
    train_small(context)
    engine = TransformersEngine(TransformersEngineConfig(), context.policy_folder, dtype="bfloat16")
    await engine.start()
    try:
        await engine.suspend("continue")
        await engine.update(1, context.weights(1))
        with pytest.raises(Corrupt):
            await engine.update(2, tmp_path)
        await engine.update(3, context.weights(3))
        assert bits(engine._sampler) == bits(_loaded(context, 3))
    finally:
        await engine.close()


def _loaded(context: RunContext, version: int) -> FixedShapeSampler:
    sampler = FixedShapeSampler(context.policy_folder, torch.bfloat16, 4, ())
    sampler.load(context.weights(version))
    return sampler


@pytest.mark.slow
@pytest.mark.xdist_group("vllm")
async def test_vllm_loads_a_version_that_is_stored_as_deltas(tmp_path: Path) -> None:
    """The log-probs are exactly those of the same weights in a folder without deltas."""
    policies, copy = published_twice(tmp_path), tmp_path / "copy"
    copy.mkdir()
    policies.copy_weights(policies.find(1), copy)
    engine = VllmEngine(VllmEngineConfig(), make_policy(tmp_path / "policy"))
    await engine.start()
    try:
        await engine.suspend("continue")
        tokens, found = list(range(3, 40)), []
        for version in range(2):
            await engine.update(version, policies.weights_folder(policies.find(version), tmp_path / "cache"))
            found.append(await engine.logprobs(tokens))
        await engine.update(1, copy)
        assert await engine.logprobs(tokens) == found[1] != found[0]
    finally:
        await engine.close()


def published_twice(folder: Path) -> PolicyStore:
    """Publish a policy, and the same policy with a few changed weights as deltas."""
    run = LocalStore(folder / "run")
    begin(run, full_every=10)
    (policies, writer), (batches, scheduler), parent = learning(run), scheduling(run), ParentWeights(10)
    file = make_weights(folder / "weights", seed=0) / "model.safetensors"
    data = bytearray(file.read_bytes())
    publish_weights(policies, writer, {"weights/model.safetensors": bytes(data)}, parent, 0)
    batches.commit(scheduler, staged())
    policies.newest()
    for place in range(len(data) - 2, len(data) // 2, -400):
        data[place] ^= 1 << 6
    version = publish_weights(policies, writer, {"weights/model.safetensors": bytes(data)}, parent, 1)
    assert len(version.deltas) == 1
    return policies
