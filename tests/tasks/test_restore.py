"""Any version is restored bit for bit from any stored state; damaged objects are restored, or an error names them."""

from __future__ import annotations

import threading
import uuid
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt, NotFinite, Unreachable
from rollflow.storage.log.entries import BatchVoided, VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed
from rollflow.storage.objects.base import hash_pieces, split_buffers
from rollflow.storage.objects.disk import map_file
from rollflow.storage.records import GroupKey, StoredObject
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.learners.base import Learner, WaitForPublish, no_wait
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.restore import RestoredVersion, list_files, new_learner, restore, train_again
from rollflow.tasks.runtime.node import node_cache
from tests.support.log_runs import of_kind
from tests.support.small_run import ALL_ROLES, StoreFeed, prepare_small, train_small

Prepare = Callable[..., RunContext]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Prepare:
    """Return a function that prepares runs; the fixture's parameter, if it has one, is their `[train]`."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    train = getattr(request, "param", None)
    return lambda run_id="small", **store: prepare_small(tmp_path, run_id, train=train, **{"keep_last": 10, **store})


def hashes(learner: Learner) -> dict[str, str]:
    return {name: hash_pieces(split_buffers(data)) for name, data in list_files(learner).items()}


def restored(context: RunContext, version: int, *, heal: bool = False) -> tuple[Learner, RestoredVersion]:
    learner = new_learner(context, blank=True)
    return learner, restore(context.policies, context.batches, learner, version, heal=heal)


WITH_AND_WITHOUT_ROLES = pytest.mark.parametrize("small", [None, ALL_ROLES], ids=["plain", "roles"], indirect=True)


@WITH_AND_WITHOUT_ROLES
@pytest.mark.parametrize(("every", "bases"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 0, 0, 3, 3, 3, 6])])
def test_any_policy_version_can_be_restored(small: Prepare, every: int, bases: list[int]) -> None:
    context = small(state_every=every)
    train_small(context)
    policies, batches = context.policies, context.batches
    forward, _ = restored(context, 0)
    for version in range(7):
        if version:
            assert train_again(policies, batches, forward, version).differences == ()
        learner, how = restored(context, version)
        assert hashes(learner) == hashes(forward)
        assert (how.base, how.replayed) == (bases[version], version - bases[version])
        assert bool(policies.find(version).state) == (bases[version] == version)


@WITH_AND_WITHOUT_ROLES
@pytest.mark.parametrize("every", [1, 4])
def test_killed_learner_ends_with_bit_identical_weights(small: Prepare, every: int) -> None:
    whole, broken = small("whole"), small("broken", state_every=every)
    train_small(whole)
    for until in (0, 2, 3, 5):
        train_small(broken, until)
    last = train_small(broken)
    assert last.version == 6
    assert last.status().replayed == (1 if every == 4 else 0)
    shas = [{o.path.rpartition("/")[2]: o.sha256 for o in c.policies.find(6).weights} for c in (whole, broken)]
    assert shas[0] == shas[1]
    assert hashes(restored(broken, 6)[0]) == hashes(restored(whole, 6)[0])
    assert audit(broken.store).clean


def flip(context: RunContext, stored: StoredObject) -> None:
    data = bytearray(context.store.get(stored.path))
    data[len(data) // 2] ^= 1
    context.store.put(stored.path, bytes(data))


@WITH_AND_WITHOUT_ROLES
@pytest.mark.parametrize("damage", [flip, lambda c, o: c.store.delete(o.path), lambda c, o: c.store.put(o.path, b"x")])
def test_damaged_objects_are_restored_by_training_again(
    small: Prepare, damage: Callable[[RunContext, StoredObject], None]
) -> None:
    """The newest version's weights and the previous version's state are lost; a restarted learner heals both."""
    context = small()
    train_small(context, 5)
    lost = [context.policies.find(5).weights[0], context.policies.find(4).state[0]]
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


def test_stored_weight_files_are_mapped_one_at_a_time(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is released when the first tensor of the next one is read.

    The learner's own state is read by another iterator, so that two files may be mapped at that moment.
    """
    context = small(shard_bytes=20_000)
    train_small(context, 2)
    maps: list[weakref.ref[Any]] = []

    def watched(path: Path) -> memoryview:
        assert sum(one() is not None for one in maps) <= 2
        data = map_file(path)
        maps.append(weakref.ref(data.obj))
        return data

    monkeypatch.setattr("rollflow.tasks.run.config_switch.map_file", watched)
    restored(context, 2)
    assert len(maps) > 20
    assert not any(one() for one in maps)


def test_remote_weights_are_downloaded_and_verified(small: Prepare) -> None:
    """The store has no local files. Damage is still found, and no fetched file is left behind."""
    context = small(uri=f"memory://{uuid.uuid4().hex}", shard_bytes=20_000)
    train_small(context, 3)
    expected = hashes(restored(context, 2)[0])
    flip(context, context.policies.find(2).state[0])
    learner, how = restored(context, 2)
    assert (how.base, hashes(learner)) == (1, expected)
    assert not [path for path in node_cache().iterdir() if path.name.startswith("restore-")]


def test_error_names_a_version_that_cannot_be_restored(small: Prepare) -> None:
    context = small()
    train_small(context, 2)
    for version in range(3):
        flip(context, context.policies.find(version).weights[0])
    with pytest.raises(Corrupt, match=r"version 2 cannot be restored: policies/00000002/.* is damaged or missing"):
        restored(context, 2)


@WITH_AND_WITHOUT_ROLES
def test_differing_replay_continues_from_the_published_weights(small: Prepare) -> None:
    """Version 3 was published with other weights than its batch gives, as if by another kind of machine."""
    context = small(state_every=2)
    train_small(context, 2)
    policies, writer = context.policies, context.log.claim("learner")
    foreign = context.store.get(policies.find(1).weights[0].path)
    [weights] = policies.stage(writer, 3, {"weights/model.safetensors": foreign})
    policies.publish(writer, VersionPublished(3, context.log.state.waiting[2].entry, (weights,)))
    learner, how = restored(context, 3)
    assert how.differed == [3]
    assert "differs" in how.sentence()
    assert hashes(learner)["weights/model.safetensors"] == weights.sha256
    flip(context, weights)
    with pytest.raises(Corrupt, match="a replay gives other weights; it may need the same kind of machine"):
        restored(context, 3, heal=True)


def test_replay_with_a_damaged_or_missing_batch_is_an_error(small: Prepare) -> None:
    context = small(state_every=6)
    train_small(context, 2)
    entry = context.policies.find(2).batch_entry
    assert entry is not None
    file = context.batches.read_commit(entry).file
    flip(context, file)
    with pytest.raises(Corrupt, match=rf"{file.path} does not have the content that its log entry names"):
        restored(context, 2)
    context.store.delete(file.path)
    with pytest.raises(Corrupt, match=rf"{file.path} is missing"):
        restored(context, 2)


def test_repeated_learner_calls_wait_for_the_first_call(small: Prepare) -> None:
    context = small()
    actor = LearnerActor(context, channel=StoreFeed(context))
    ended: list[int] = []
    calls = [threading.Thread(target=lambda: ended.append(actor.run())) for _ in range(4)]
    for call in calls:
        call.start()
    for call in calls:
        call.join()
    assert ended == [6, 6, 6, 6]
    assert audit(context.store).versions == 6


def test_replaced_learner_stops_and_names_its_successor(small: Prepare) -> None:
    """The first learner had trained on a batch and stored the result; the second one trains on that batch again."""
    context = small()

    class Followed(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            self.await_version(number)
            if number == 2:
                replace(self.context).log.claim("learner", who="the second one", host="elsewhere", process=7)
            return super().lease(number, deadline, afresh=afresh)

    first = LearnerActor(context, channel=Followed(context))
    for _ in range(2):  # a second call raises the same error
        with pytest.raises(
            Deposed, match=r"another learner now \(the second one, process 7 on elsewhere\); this learner"
        ):
            first.run()
    assert context.policies.newest() == 2
    assert len(list(context.store.list("policies/00000003"))) > 0
    train_small(replace(context))
    assert context.policies.newest() == 6
    report = audit(context.store)
    assert report.clean, report.violations


def test_damaged_batch_is_voided_and_formed_again(small: Prepare) -> None:
    context = small()
    train_small(context, 3)
    damaged = context.log.state.waiting[3]
    context.store.put(damaged.file.path, context.store.get(damaged.file.path)[:-9])
    train_small(context)
    assert consumed(context, 4) == [GroupKey(6, 1), GroupKey(7, 1)]
    [void] = of_kind(context.store, BatchVoided)
    assert isinstance(void.body, BatchVoided)
    assert (void.body.number, void.body.entry, void.role) == (3, damaged.entry, "learner")
    report = audit(context.store)
    assert report.clean, report.violations


def test_replaced_learner_stops_when_its_lease_ends(small: Prepare) -> None:
    """The second learner trains on the batch that the first one waits for."""
    context, waited = small(), []
    train_small(context, 2)

    class Late(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            waited.append(number)
            if len(waited) == 2:
                train_small(replace(context), 4)
            raise TimeoutError(f"waited for batch {number}")

    first = LearnerActor(context, channel=Late(context))
    with pytest.raises(Deposed, match="the run has another learner now"):
        first.run()
    assert waited == [2, 2]
    assert context.policies.newest() == 4
    assert audit(context.store).clean


def test_metrics_count_discarded_groups_of_voided_batches(small: Prepare) -> None:
    """Batch 2 discarded one group, was damaged, and was formed again without a discard."""
    context = small()
    train_small(context, 2)
    context.store.put(context.log.state.waiting[2].file.path, b"rotten")
    train_small(context)
    metrics = context.policies.find(3).metrics
    found = {name: metrics[name] for name in ("discarded_groups", "discarded_tokens", "discarded_stale")}
    assert found == {"discarded_groups": 1.0, "discarded_tokens": 21.0, "discarded_stale": 1.0}
    totals = context.log.state.totals
    assert (totals.groups["stale"], totals.tokens["stale"]) == (1, 21)
    others = [context.policies.find(version).metrics["discarded_groups"] for version in (1, 2, 4, 5, 6)]
    assert others == [0.0] * 5


@pytest.mark.parametrize("late", [False, True], ids=["before it is trained on", "while it is trained on"])
def test_batch_voided_by_another_process_is_not_published(
    small: Prepare, monkeypatch: pytest.MonkeyPatch, *, late: bool
) -> None:
    """The learner goes back to its state before that batch, and trains on the batch that replaces it."""
    whole, context = small("whole"), small("broken")
    train_small(whole)
    step = TorchLearner.step

    def lost(feed: StoreFeed, number: int) -> None:
        if number == 3 and not context.log.state.voids:
            path = context.log.state.waiting[3].file.path
            context.store.put(path, context.store.get(path)[:-9])
            assert feed.batches.void(feed.writer, 3, "it was found damaged")

    class Voiding(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            data = super().lease(number, deadline, afresh=afresh)
            if not late:
                lost(self, number)
            return data

    def voiding(self: TorchLearner, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> object:
        metrics = step(self, batch, version, settle)
        if late:
            lost(feed, version)
        return metrics

    feed = Voiding(context)
    monkeypatch.setattr(TorchLearner, "step", voiding)
    assert LearnerActor(context, channel=feed).run() == 6
    assert context.log.state.voids == 1
    assert consumed(context, 4) == [GroupKey(6, 1), GroupKey(7, 1)]
    assert hashes(restored(context, 6)[0]) == hashes(restored(whole, 6)[0])
    report = audit(context.store)
    assert report.clean, report.violations


def consumed(context: RunContext, version: int) -> list[GroupKey]:
    entry = context.policies.find(version).batch_entry
    assert entry is not None
    return [group.key for group in context.batches.read_commit(entry).groups]


def test_damaged_copy_in_the_channel_is_read_again(small: Prepare) -> None:
    """The store's file is intact, so nothing is voided: the batch is read from the store."""
    context = small()

    class Damaging(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            data = super().lease(number, deadline)
            return data if afresh else pa.py_buffer(data.to_pybytes()[:-9])

    assert LearnerActor(context, channel=Damaging(context)).run() == 6
    assert of_kind(context.store, BatchVoided) == []
    report = audit(context.store)
    assert report.clean, report.violations


def test_learner_retries_reads_that_fail_in_the_channel(small: Prepare) -> None:
    """The channel's reads fail while the store is unreachable; that is no reason to restart the learner."""
    context, failures = small(), [Unreachable("object storage did not answer"), TimeoutError("no batch yet")] * 3

    class Failing(StoreFeed):
        def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
            if failures:
                raise failures.pop()
            return super().lease(number, deadline, afresh=afresh)

    assert LearnerActor(context, channel=Failing(context)).run() == 6
    assert failures == []


def row_of_the_embedding(learner: Learner) -> torch.Tensor:
    """Return an embedding row that no probe uses."""
    return learner.model.get_input_embeddings().weight[255]  # type: ignore[attr-defined]


def bias(learner: Learner) -> torch.Tensor:
    return learner.model.base_model.layers[0].self_attn.q_proj.bias  # type: ignore[attr-defined]


def moment(learner: Learner) -> torch.Tensor:
    return learner.policy.adamw.state[learner.model.get_input_embeddings().weight]["exp_avg_sq"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [row_of_the_embedding, bias, moment])
def test_nonfinite_version_stores_no_object(
    small: Prepare, where: Callable[[Learner], torch.Tensor], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the nonfinite value is, nothing of the version is stored, and the run continues from the version
    before.
    """
    context = small()
    train_small(context, 2)
    before = objects(context)
    with monkeypatch.context() as patch:
        patch.setattr(TorchLearner, "step", breaking(where, value))
        why = "version 3 is not published, because .* NaN or an infinity; start another run .* lower train"
        with pytest.raises(NotFinite, match=why):
            train_small(context, 3)
    assert objects(context) == before
    train_small(context, 3)
    assert context.policies.newest() == 3


def objects(context: RunContext) -> list[str]:
    """Return all paths except the log's entries, because a learner that starts claims its role in the log."""
    return sorted(path for path in context.store.list() if not path.startswith("log/"))


def breaking(where: Callable[[Learner], torch.Tensor], value: float) -> Callable[..., object]:
    whole = TorchLearner.step

    def step(self: TorchLearner, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> object:
        metrics = whole(self, batch, version, settle)
        with torch.no_grad():
            where(self).view(-1)[-1] = value
        return metrics

    return step


def test_nonfinite_policy_is_not_published_as_version_0(small: Prepare) -> None:
    context = small()
    file = context.first_weights / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][255, 0] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NotFinite, match=r"version 0 is not published, because model\.embed_tokens\.weight has a NaN"):
        train_small(context, 1)
    assert list(context.store.list("policies")) == []


def test_nonfinite_metric_is_left_out_and_reported(small: Prepare, monkeypatch: pytest.MonkeyPatch) -> None:
    sound, context = TorchLearner.step, small()

    def step(self: TorchLearner, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> object:
        return {**sound(self, batch, version, settle), "kl_of_mine": float("inf"), "gap_of_mine": float("nan")}

    monkeypatch.setattr(TorchLearner, "step", step)
    actor = train_small(context, 1)
    assert actor.status().note == "version 1 is logged without gap_of_mine, kl_of_mine: not finite"
    [version] = [e.body for e in of_kind(context.store, VersionPublished) if getattr(e.body, "number", 0)]
    assert isinstance(version, VersionPublished)
    assert not any("mine" in name for name in version.metrics)
    assert "loss" in version.metrics


def test_replaced_cold_start_writes_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other learner has completed the cold start, and an adapter starts from the weights that are stored."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    questions = tmp_path / "sums.jsonl"
    questions.write_text("".join(f'{{"question": "{i}+1", "answer": "{i + 1}"}}\n' for i in range(40)))
    prompts = [{"kind": "jsonl", "path": str(questions)}]
    engine = {"kind": "transformers", "max_new_tokens": 8}
    tree = {"policy": {"cold_start": {"hidden_size": 32, "heads": 2}}, "prompts": prompts, "engine": engine}
    context = prepare(parse_config({**tree, "reward": {"kind": "exact"}, "evaluation": {"prompts": 4}}), "cold")
    monkeypatch.setattr(LearnerActor, "_run_cold_start", lambda actor: Log(context.store).claim("learner"))
    with pytest.raises(Deposed):
        LearnerActor(context, channel=StoreFeed(context)).run()
    assert not any(path.endswith(".safetensors") for path in context.store.list())
