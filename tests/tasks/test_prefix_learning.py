"""A train step in which rows share tokens has the loss and the gradients of a step on separate rows, with each part of
a learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.token_arrays import Float32s, Int64s
from rollflow.tasks.learners.torch_learner import TorchLearner
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.testing.learners import batch_of
from tests.tasks.test_learner import folder, learner
from tests.tasks.test_observation_loss import build_row

__all__ = ["folder"]  # a fixture
NEAR = 1e-6  # largest accepted relative difference
CASES: Mapping[str, Mapping[str, Any]] = {
    **{kind: {"objective": {"kind": kind}} for kind in PRESETS},
    "critic of its own": {"objective": {"kind": "ppo"}, "critic": {"model": "own"}},
    "critic's head": {"objective": {"kind": "ppo"}, "critic": {"model": "head"}},
    "reference": {"objective": {"kind": "grpo", "penalties": {"kl_weight": 0.1}}},
    "entropy": {"objective": {"kind": "grpo", "penalties": {"entropy_weight": 0.1}}},
    "LoRA": {"lora": {"rank": 4}},
    "LoRA and reference": {"lora": {"rank": 4}, "objective": {"kind": "grpo", "penalties": {"kl_weight": 0.1}}},
    "observations": {"objective": {"kind": "grpo", "observation_weight": 0.3}},
    "corrections": {"objective": {"kind": "grpo", "correction": {"outside": "mask", "high": 1.1, "weigh": False}}},
    "recomputed layers": {"checkpoint_activations": True},
    "two minibatches": {"objective": {"kind": "decoupled-ppo"}, "minibatches": 2},
}


def episodes(seed: int = 0, *, values: bool = False) -> TrajectoryBatch:
    """Return three groups of rows, which share sampled tokens; a row is a prefix of another one, and two are equal."""
    draw, groups = torch.Generator().manual_seed(seed), []

    def tokens(count: int) -> list[int]:
        return torch.randint(3, 250, (count,), generator=draw).tolist()

    for _ in range(3):
        prompt, first, answer = tokens(9), tokens(4), tokens(3)
        trunk = [*prompt, *first, *answer]
        mask = [False] * 9 + [True] * 4 + [False] * 3
        ends = [tokens(count) for count in (5, 2, 7)]
        rows = [([*trunk, *end], [*mask, *[True] * len(end)]) for end in ends]
        rows += [rows[0], (trunk[:12], mask[:12]), ([*prompt, *tokens(6)], [False] * 9 + [True] * 6)]
        rows += [([*trunk, *ends[2][:3], *tokens(4)], [*mask, *[True] * 7])]
        built = [build_row(sample, *row, reward=float(sample % 3)) for sample, row in enumerate(rows)]
        built = [replace(one, turn_starts=(9,), turn_states=Int64s.of([7])) for one in built]
        if values:
            built = [replace(one, token_rewards=_values_of(one.loss_mask)) for one in built]
        groups.append(built)
    return batch_of(*groups)


def _values_of(mask: Any) -> Float32s:
    return Float32s.of([0.1 * place if chosen else float("nan") for place, chosen in enumerate(mask)])


def gradients(made: TorchLearner, batch: TrajectoryBatch) -> tuple[Mapping[str, float], list[dict[str, Tensor]]]:
    """Take a step, and return its metrics and the gradients of each update, of the policy and of the critic."""
    found: list[dict[str, Tensor]] = []
    optimized = [made.policy, *([made.critic.optimized] if made.critic else [])]
    for one in optimized:
        step = one.adamw.step

        def noted(one: Any = one, step: Any = step) -> None:
            found.append({n: p.grad.double().clone() for n, p in one.trained.parameters.items() if p.grad is not None})
            step()

        one.adamw.step = noted  # type: ignore[method-assign]
    return made.step(batch, 0), found


@pytest.mark.parametrize("values", [False, True], ids=["rows", "token values"])
@pytest.mark.parametrize("name", CASES)
def test_step_with_shared_prefixes_equals_a_step_on_rows(folder: Path, name: str, values: bool) -> None:
    if values and name not in ("grpo", "critic's head", "recomputed layers"):
        return
    found = []
    for share, micro_tokens in (("none", 4096), ("all", 4096), ("all", 40)):
        made = learner(
            folder,
            learning_rate=1e-9,
            max_grad_norm=1e9,
            share_prefixes=share,
            micro_tokens=micro_tokens,
            **CASES[name],
        )
        if made.sharing is not None:
            made.sharing = replace(made.sharing, dense=4)
        found.append(gradients(made, episodes(values=values)))
    (told, alone), *shared = found
    for others, together in shared:
        assert others == pytest.approx(told, rel=1e-4, abs=1e-5)
        for one, other in zip(together, alone, strict=True):
            assert one.keys() == other.keys()
            whole = torch.cat([grad.flatten() for grad in other.values()]).norm()
            apart = torch.cat([(one[name] - other[name]).flatten() for name in other]).norm()
            assert float(apart) <= NEAR * float(whole)
