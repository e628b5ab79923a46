"""Restoring: from any version, from any base, the learner is bit for bit where it was; damage is made good or named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollflow.storage.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Conflict, Corrupt, RollflowError, Unreachable
from rollflow.storage.objects.base import digest, pieces
from rollflow.storage.policies import PolicyStore, manifest_path
from rollflow.storage.records import Cursor, GroupKey, StoredObject
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.learners.actor import LearnerActor
from rollflow.tasks.learners.base import Learner
from rollflow.tasks.learners.restore import Restored, base_of, files, new_learner, restore, train_again
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.run import RunContext
from tests.support.small_run import StoreFeed, batch_again, prepare_small, train_small

Prepare = Callable[..., RunContext]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    return lambda run_id="small", **store: prepare_small(tmp_path, run_id, **{"keep_last": 10, **store})


def hashes(learner: Learner) -> dict[str, str]:
    return {name: digest(pieces(data)) for name, data in files(learner).items()}


def restored(context: RunContext, version: int, *, heal: bool = False) -> tuple[Learner, Restored]:
    learner = new_learner(context)
    return learner, restore(context.policies(), TrajectoryStore(context.store), learner, version, heal=heal)


@pytest.mark.parametrize(("every", "bases"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 0, 0, 3, 3, 3, 6])])
def test_any_version_can_be_restored(small: Prepare, every: int, bases: list[int]) -> None:
    context = small(state_every=every)
    train_small(context)
    policies, batches = context.policies(), TrajectoryStore(context.store)
    forward, _ = restored(context, 0)
    for version in range(7):
        if version:
            assert train_again(policies, batches, forward, version).differences == ()
        learner, how = restored(context, version)
        assert hashes(learner) == hashes(forward)
        assert (how.base, how.replayed) == (bases[version], version - bases[version])
        assert base_of(policies, version) == bases[version]
        assert bool(policies.manifest(version).learner) == (bases[version] == version)


@pytest.mark.parametrize("every", [1, 4])
def test_a_killed_learner_ends_where_the_unbroken_one_does(small: Prepare, every: int) -> None:
    whole, broken = small("whole"), small("broken", state_every=every)
    train_small(whole)
    for until in (0, 2, 3, 5):
        train_small(broken, until)
    last = train_small(broken)
    assert last.version == 6
    assert last.status()["replayed"] == (1 if every == 4 else 0)
    shas = [{o.path.rpartition("/")[2]: o.sha256 for o in c.policies().manifest(6).weights} for c in (whole, broken)]
    assert shas[0] == shas[1]
    assert hashes(restored(broken, 6)[0]) == hashes(restored(whole, 6)[0])
    assert audit(broken.store).clean


def flip(context: RunContext, stored: StoredObject) -> None:
    data = bytearray(context.store.get(stored.path))
    data[len(data) // 2] ^= 1
    context.store.put(stored.path, bytes(data))


@pytest.mark.parametrize("damage", [flip, lambda c, o: c.store.delete(o.path), lambda c, o: c.store.put(o.path, b"x")])
def test_damaged_objects_are_made_again(small: Prepare, damage: Callable[[RunContext, StoredObject], None]) -> None:
    """The newest version's weights and the state of the one before are lost; a restarted learner heals both."""
    context = small()
    train_small(context, 5)
    policies = context.policies()
    lost = [policies.manifest(5).weights[0], policies.manifest(4).learner[0]]
    before = [context.store.get(o.path) for o in lost]
    for stored in lost:
        damage(context, stored)
    assert not audit(context.store).clean
    actor = train_small(context)
    assert actor.restored is not None
    assert (actor.restored.base, actor.restored.replayed) == (3, 2)
    assert sorted(actor.restored.healed) == sorted(o.path for o in lost)
    assert [context.store.get(o.path) for o in lost] == before
    report = audit(context.store)
    assert report.clean, report.violations


def test_what_cannot_be_rebuilt_is_named(small: Prepare) -> None:
    context = small()
    train_small(context, 2)
    for version in range(3):
        flip(context, context.policies().manifest(version).weights[0])
    with pytest.raises(Corrupt, match=r"version 2 cannot be restored: policies/00000002/.* is damaged or missing"):
        restored(context, 2)


def test_a_replay_that_differs_goes_on_with_the_published_weights(small: Prepare) -> None:
    """Version 3 was published with other weights than its batch gives, as another machine would have."""
    context = small(state_every=2)
    train_small(context, 3)
    policies = context.policies()
    manifest = policies.manifest(3)
    foreign = context.store.get(policies.manifest(1).weights[0].path)
    [weights] = policies.stage(3, {"weights/model.safetensors": foreign})
    context.store.put(manifest_path(3), replace(manifest, weights=(weights,)).to_json())
    learner, how = restored(context, 3)
    assert how.differed == [3]
    assert "differs" in how.sentence()
    assert hashes(learner)["weights/model.safetensors"] == weights.sha256
    flip(context, weights)
    with pytest.raises(Corrupt, match="its replay gives other weights; was it trained on another kind of machine"):
        restored(context, 3, heal=True)


def test_only_the_batch_that_was_recorded_is_trained_again(small: Prepare) -> None:
    context = small(state_every=6)
    train_small(context, 2)
    batches = TrajectoryStore(context.store)
    record = batches.record(1)
    other = replace(record, cursor=Cursor((9,), (0,)))
    context.store.put("trajectories/00000001.json", other.to_json())
    with pytest.raises(Corrupt, match="batch 1 is not the one version 2 was trained on"):
        restored(context, 2)
    context.store.delete("trajectories/00000001.json")
    with pytest.raises(Corrupt, match="batch 1, which version 2 was trained on, is missing"):
        restored(context, 2)


def test_a_second_run_call_joins_the_first(small: Prepare) -> None:
    context = small()
    actor = LearnerActor(context, StoreFeed(TrajectoryStore(context.store), 6))
    ended: list[int] = []
    calls = [threading.Thread(target=lambda: ended.append(actor.run())) for _ in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert ended == [6, 6, 6, 6]
    assert audit(context.store).versions == 6


def test_a_second_learner_stops_and_names_the_first(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    context = small()
    first, second = (LearnerActor(context, StoreFeed(TrajectoryStore(context.store), 6)) for _ in range(2))
    first.run()
    winner = context.policies().manifest(0).writer
    monkeypatch.setattr(PolicyStore, "latest", lambda *_: -1)  # the second looked before the first had published
    for _ in range(2):  # whoever asks again hears the same
        with pytest.raises(Conflict, match=rf"version 0 was published by another learner \(writer {winner}\)"):
            second.run()
    report = audit(context.store)
    assert report.clean, report.violations


def test_a_damaged_batch_is_voided_and_its_next_edition_trained_on(small: Prepare) -> None:
    context = small()
    train_small(context, 3)
    batches = TrajectoryStore(context.store)
    file = batches.record(3).file
    context.store.put(file, context.store.get(file)[:-9])

    class Reforming(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            if not self.batches.committed(number):
                self.batches.commit(batch_again(context, number), 1.0)
            return super().lease(number, deadline, afresh=afresh)

    actor = LearnerActor(context, Reforming(TrajectoryStore(context.store), 6))
    assert actor.run() == 6
    [void] = TrajectoryStore(context.store).voids()
    assert (void.batch, void.file) == (3, file)
    assert context.policies().manifest(4).consumed == (GroupKey(6, 1), GroupKey(7, 1))
    report = audit(context.store)
    assert report.clean, report.violations


def test_a_damaged_copy_in_the_channel_is_not_trained_on(small: Prepare) -> None:
    """The store's file is sound, so nothing is voided: the batch is read afresh."""
    context = small()

    class Damaging(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            data = super().lease(number, deadline)
            return data if afresh else pa.py_buffer(data.to_pybytes()[:-9])

    assert LearnerActor(context, Damaging(TrajectoryStore(context.store), 6)).run() == 6
    assert TrajectoryStore(context.store).voids() == []
    report = audit(context.store)
    assert report.clean, report.violations


def test_a_channel_that_cannot_answer_is_asked_again(small: Prepare) -> None:
    """Its own reads fail while storage is away; what it said before is no reason to start the learner again."""
    context, failures = small(), [Unreachable("object storage did not answer"), TimeoutError("no batch yet")] * 3

    class Failing(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            if failures:
                raise failures.pop()
            return super().lease(number, deadline, afresh=afresh)

    assert LearnerActor(context, Failing(TrajectoryStore(context.store), 6)).run() == 6
    assert failures == []


def row_of_the_embedding(learner: Learner) -> torch.Tensor:
    """One that no probe looks up."""
    return learner.model.get_input_embeddings().weight[255]  # type: ignore[attr-defined]


def bias(learner: Learner) -> torch.Tensor:
    return learner.model.base_model.layers[0].self_attn.q_proj.bias  # type: ignore[attr-defined]


def moment(learner: Learner) -> torch.Tensor:
    return learner.optimizer.state[learner.model.get_input_embeddings().weight]["exp_avg_sq"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [row_of_the_embedding, bias, moment])
def test_a_version_that_is_not_finite_leaves_nothing(
    small: Prepare, where: Callable[[Learner], torch.Tensor], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is uploaded, wherever the value is; the version before stands, and the run goes on from it."""
    context = small()
    train_small(context, 2)
    before = sorted(context.store.list())
    with monkeypatch.context() as patch:
        patch.setattr(TorchLearner, "step", breaking(where, value))
        with pytest.raises(RollflowError, match=r"version 3 is not published: .* NaN or an infinity; lower train"):
            train_small(context, 3)
    assert sorted(context.store.list()) == before
    train_small(context, 3)
    assert context.policies().latest() == 3


def breaking(where: Callable[[Learner], torch.Tensor], value: float) -> Callable[..., object]:
    whole = TorchLearner.step

    def step(self: TorchLearner, batch: TrajectoryBatch, version: int) -> object:
        metrics = whole(self, batch, version)
        with torch.no_grad():
            where(self).view(-1)[-1] = value
        return metrics

    return step


def test_a_policy_that_is_not_finite_is_no_first_version(small: Prepare) -> None:
    context = small()
    file = context.first_weights / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][255, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RollflowError, match=r"version 0 is not published: model\.embed_tokens\.weight has a NaN"):
        train_small(context, 1)
    assert list(context.store.list("policies")) == []
