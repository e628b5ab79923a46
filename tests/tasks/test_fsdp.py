"""Compares the torch learner sharded over ranks (FSDP2) with a learner of one rank: their steps are equal, and each
loads the other's state.
"""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers import RobertaConfig, RobertaForCausalLM

from rollflow.storage.errors import NotFinite, RankFailed
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.multi_rank.multi_rank_learner import MultiRankLearner
from rollflow.tasks.learners.updates import Updates
from rollflow.testing.learners import batch, batch_of, changed, saved, trajectory
from tests.support.tiny_policy import VOCABULARY, make_policy, make_weights
from tests.tasks.test_ranks import one_with_signal
from tests.tasks.test_sharded import (
    KINDS,
    NEAR,
    SOAK,
    alone,
    assert_gathered_beside_a_step,
    assert_gathered_file_by_file,
    begun,
    farthest,
    tensors,
)
from tests.tasks.test_sharded import sharded as deepspeed

RATE = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def in_parts(
    folder: Path, ranks: int = 2, dtype: str = "float32", seconds: float = 60.0, **given: Any
) -> MultiRankLearner:
    config = TorchTrain(sharded=True, ranks=ranks, rank_seconds=seconds, learning_rate=RATE, **given)
    made: MultiRankLearner = begun(folder, config, dtype)
    return made


def whole(folder: Path, dtype: str = "float32", **given: Any) -> Any:
    return begun(folder, TorchTrain(learning_rate=RATE, **given), dtype)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, r"train\.ranks = 1: .* 2 or more, or set sharded = false"),
        ({"ranks": 2, "lora": {}}, r"train\.lora\.rank = 16: .*; remove \[train\.lora\], or set sharded = false"),
        (
            {"ranks": 2, "objective": {"kind": "ppo"}, "critic": {"model": "head"}},
            r"train\.critic\.model = 'head': .*; choose \"own\"",
        ),
    ],
)
def test_options_that_fsdp_does_not_support_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TorchTrain.model_validate({"sharded": True, **given})


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "kind", "more"),
    [
        (2, "PPO with a critic", {"micro_tokens": 40}),
        pytest.param(2, "GRPO", {"checkpoint_activations": True}, marks=SOAK),
        pytest.param(2, "decoupled PPO", {"share_prefixes": "none"}, marks=SOAK),
        pytest.param(2, "weight decay of matrices", {}, marks=SOAK),
        pytest.param(4, "PPO with a critic", {}, marks=SOAK),
    ],
)
def test_fsdp_learner_trains_like_a_single_process(folder: Path, ranks: int, kind: str, more: dict[str, Any]) -> None:
    """The options change how the update is computed, but not the result of the update."""
    one, expected = alone(folder, kind)
    made = in_parts(folder, ranks, **{**KINDS[kind], **more})
    for version, told in enumerate(expected):
        found = made.step(batch(version), version)
        assert {name: found[name] for name in told} == pytest.approx(told, abs=NEAR, rel=1e-4)
    assert farthest(tensors(made), tensors(one)) < NEAR
    assert made.logprobs((3, 4, 5)) == pytest.approx(one.logprobs((3, 4, 5)), abs=NEAR * 10)
    stored = saved(made)
    again = whole(folder, **KINDS[kind])
    again.load(*stored)
    assert saved(again) == stored
    again.step(batch(10), 10)
    made.load(*saved(again))
    assert saved(made) == saved(again)
    for learner in (made, again):
        learner.step(batch(11), 11)
    assert farthest(tensors(made), tensors(again)) < NEAR
    assert_gathered_file_by_file(made)
    assert made.first_nonfinite() is None
    weights, state = saved(made)
    made.load(weights, changed(state, lambda found: found[min(found)].view(-1)[-1].fill_(math.nan)))
    assert str(made.first_nonfinite()).startswith("exp_avg/")  # the changed value is in a shard of the last rank
    made._others.end()


@pytest.mark.long
@pytest.mark.parametrize("tied", [True, False])
def test_fsdp_embeddings_train_like_in_a_single_process(tied: bool, tmp_path: Path) -> None:
    """With 320 tokens the last of three ranks has fewer rows; a separate head is gathered beside the embeddings."""
    policy = make_weights(tmp_path, seed=1, tied=tied)
    made, one = in_parts(policy, ranks=3), whole(policy)
    for version in range(4):
        told, expected = (learner.step(batch(version), version) for learner in (made, one))
        assert told["loss"] == pytest.approx(expected["loss"], abs=NEAR, rel=1e-4)
        assert made.logprobs((3, 4, 5)) == pytest.approx(one.logprobs((3, 4, 5)), abs=NEAR * 10)
    assert farthest(tensors(made), tensors(one)) < NEAR
    made._others.end()


@pytest.mark.long
def test_fsdp_module_with_children_is_not_gathered_alone(tmp_path: Path) -> None:
    """RoBERTa's output head has child modules (a norm, for example) and a bias of its own."""
    torch.manual_seed(1)
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "is_decoder": True}
    RobertaForCausalLM(RobertaConfig(vocab_size=VOCABULARY, hidden_size=32, **layers)).save_pretrained(tmp_path)
    made, one = in_parts(tmp_path), whole(tmp_path)
    for version in range(2):
        for learner in (made, one):
            learner.step(batch(version), version)
    assert farthest(tensors(made), tensors(one)) < NEAR
    made._others.end()


@pytest.mark.long
@pytest.mark.parametrize("others", [(3,), pytest.param((2, 4), marks=SOAK)])
def test_fsdp_state_of_four_ranks_continues_on_any_number(folder: Path, others: tuple[int, ...]) -> None:
    """Each rank stores only its shards. Three of four ranks have no shard of the critic's head, which has a single
    row.
    """
    kind = KINDS["PPO with a critic"]
    made = in_parts(folder, 4, **kind)
    made.step(batch(0), 0)
    engines = made._own.policy, made._own.critic.optimized
    for engine in engines:
        held = [part for own in engine.trained.parameters.values() for part in (own, *engine.adamw.state[own].values())]
        numbers = sum(shape.numel() for shape in engine.shapes.values())
        assert sum(part.numel() for part in held if part.dim()) < 3 * numbers / 4 * 1.01
    stored = saved(made)
    made.step(batch(1), 1)
    expected = tensors(made)
    made._others.end()
    for other in (whole(folder, **kind), *(in_parts(folder, ranks, **kind) for ranks in others)):
        other.load(*stored)
        assert saved(other) == stored
        other.step(batch(1), 1)
        assert farthest(tensors(other), expected) < NEAR


@pytest.mark.long
def test_uninitialized_critic_is_not_checked_for_nan(folder: Path) -> None:
    """Before its first update, the critic's memory may contain any values, even NaN."""
    made = in_parts(folder, **KINDS["PPO with a critic"])
    stored = saved(made)
    for parameter in made.model.parameters():
        parameter.data.fill_(math.nan)
    made.load(*stored)
    assert made.first_nonfinite() is None
    assert saved(made) == stored
    made._others.end()


@pytest.mark.long
def test_fsdp_weights_are_gathered_during_the_next_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_gathered_beside_a_step(in_parts(folder, **KINDS["PPO with a critic"]), monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp_state_continues_in_deepspeed_and_back(folder: Path, kind: str) -> None:
    made = in_parts(folder, **KINDS[kind])
    made.step(batch(0), 0)
    stored = saved(made)
    made._others.end()
    other = deepspeed(folder, 2, **KINDS[kind])
    other.load(*stored)
    assert saved(other) == stored
    other.step(batch(1), 1)
    stored = saved(other)
    other._others.end()
    again = in_parts(folder, **KINDS[kind])
    again.load(*stored)
    assert saved(again) == stored
    again._others.end()


@pytest.mark.long
def test_fsdp_rank_without_rows_takes_part_in_the_step(folder: Path) -> None:
    """Gradients that a cold start left have no effect either. If no rank has rows, the step changes no tensor."""
    one, _ = alone(folder, "GRPO", one_with_signal)
    made = in_parts(folder)
    for parameter in made.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for version in range(10):
        made.step(one_with_signal(version), version)
    before = tensors(made)
    assert farthest(before, tensors(one)) < NEAR
    made.step(batch_of([trajectory([5, 6], [7, 8], i, 1.0) for i in range(4)]), 10)
    assert farthest(tensors(made), before) == 0
    made._others.end()


@pytest.mark.long
@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (signal.SIGKILL, r"^rank 1 of 2 was killed by SIGKILL"),
        pytest.param(signal.SIGSTOP, r"^rank 1 of 2 did not reach the other ranks within 20 s", marks=SOAK),
    ],
    ids=["killed", "stopped"],
)
def test_error_names_a_dead_or_hanging_fsdp_rank(
    folder: Path, sent: signal.Signals, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rank dies or hangs while the first rank is between a forward and a backward pass."""
    made, loss_of = in_parts(folder, seconds=20.0), Updates.compute_loss
    made.step(batch(0), 0)

    def leave(*given: Any) -> Tensor:
        os.kill(made._others._started[1].process.pid or 0, sent)
        return loss_of(*given)

    monkeypatch.setattr(Updates, "compute_loss", leave)
    with pytest.raises(RankFailed, match=sentence):
        made.step(batch(1), 1)


@pytest.mark.long
def test_nonfinite_loss_changes_no_fsdp_weight(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first rank computes a NaN, but both ranks stop. The next step equals that of a learner without the
    NaN.
    """
    made, quiet = in_parts(folder), whole(folder)
    for one in (made, quiet):
        one.step(batch(0), 0)
    before, loss_of = saved(made), Updates.compute_loss
    with monkeypatch.context() as patched:
        patched.setattr(Updates, "compute_loss", lambda *given: loss_of(*given) * math.nan)
        with pytest.raises(NotFinite):
            made.step(batch(1), 1)
    assert saved(made) == before
    for one in (made, quiet):
        one.step(batch(1), 1)
    assert farthest(tensors(made), tensors(quiet)) < NEAR
    made._others.end()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["PPO with a critic", pytest.param("GRPO", marks=SOAK)])
def test_bfloat16_policy_has_sharded_float32_master_weights(folder: Path, kind: str) -> None:
    """The sharded learner is compared with two unsharded ranks, because each rank rounds its gradients to bfloat16."""
    to_reference = {"kl_to": "reference", "kl_weight": 0.1}
    given = {**KINDS[kind], "objective": {"kind": "ppo", "penalties": to_reference}} if "critic" in KINDS[kind] else {}
    made, beside = in_parts(folder, dtype="bfloat16", **given), whole(folder, "bfloat16", ranks=2, **given)
    for version in range(3):
        for one in (made, beside):
            one.step(batch(version), version)
    found, expected = tensors(made), tensors(beside)
    assert {n: t.dtype for n, t in found.items()} == {n: t.dtype for n, t in expected.items()}
    in_float32 = [name for name, tensor in found.items() if tensor.dtype == torch.float32]
    assert farthest(*({name: held[name] for name in in_float32} for held in (found, expected))) < NEAR
    assert farthest(found, expected) <= 2**-7  # one rounding step of a weight near 1
    stored = saved(made)
    beside.load(*stored)
    assert saved(beside) == stored
    beside.step(batch(3), 3)
    made.load(stored[0], saved(beside)[1])
    assert saved(made)[0] == stored[0]  # the master weights that are loaded do not belong to these weights
    made.load(*stored)
    assert saved(made) == stored  # a critic's master weights are stored before its weights
    for one in (made, beside):
        one._others.end()
