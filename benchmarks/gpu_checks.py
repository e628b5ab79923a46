"""Checks learners on a GPU: numbers against the CPU's, states that move between devices, and reproducible training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_models import (
    DEVICE,
    GPU,
    KINDS,
    QWEN_05B,
    BatchShape,
    Stepped,
    build,
    clear_memory,
    distance,
    make_batch,
    policy_folder,
    step_once,
)
from benchmarks.gpu_rows import NO_GPU, Row, check_at_most, guard
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects.base import split_buffers
from rollflow.tasks.learners.checkpoint.shards import from_files
from rollflow.tasks.learners.randomness import DEVICE_RNG
from rollflow.tasks.learners.torch_learner import TorchLearner

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "gspo": {"objective": {"kind": "gspo"}},
    "decoupled-ppo, 2 updates": {"objective": {"kind": "decoupled-ppo"}, "minibatches": 2},
    "tis": {"objective": {"kind": "tis"}},
    "kimi": {"objective": {"kind": "kimi"}},
    "m2po": {"objective": {"kind": "m2po"}},
    "ppo, its critic": {"objective": {"kind": "ppo"}},
    "grpo, reference KL": {"objective": {"kind": "grpo", "penalties": {"kl_to": "reference", "kl_weight": 0.1}}},
    "grpo, entropy": {"objective": {"kind": "grpo", "penalties": {"entropy_weight": 0.01}}},
    "grpo, LoRA": {"lora": {"rank": 4}},
    "grpo, no shared prompts": {"share_prefixes": "none"},
}
NATS, RELATIVE, STEP = 1e-4, 1e-4, 0.02  # limits in float32 for errors of log-probs, gradients and steps
BFLOAT = 1.5  # limit in bfloat16, as a multiple of the CPU's own error against float64
BACK = {"float32": 1e-4, "bfloat16": 0.2}  # limit of the next gradient's relative error after a move to another device
ROUNDED = 1e-6  # limit of relative differences that come from rounding
TOKENS = list(range(3, 120))


def run_learners() -> Iterator[Row]:
    """Compare learners of several architectures with float64 on the CPU, and learners with other objectives with
    float32 on the CPU.
    """
    for kind in KINDS:
        yield from guard(kind, partial(_architecture, kind))
    for name, keys in OBJECTIVES.items():
        yield from guard(name, partial(_objective, name, keys))


def _architecture(kind: str) -> Iterator[Row]:
    with policy_folder(kind) as folder:
        exact_learner = build(folder, "cpu", "float64", master_dtype="policy")
        batch = make_batch(BatchShape(), exact_learner.logprobs)
        said, exact = torch.tensor(exact_learner.logprobs(TOKENS)), step_once(exact_learner, batch)
        for dtype in ("float32", "bfloat16"):
            yield from guard(
                f"{kind}, {dtype}", partial(_beside, f"{kind}, {dtype}", folder, dtype, batch, said, exact)
            )


def _beside(
    name: str, folder: Path, dtype: str, batch: TrajectoryBatch, said: torch.Tensor, exact: Stepped
) -> Iterator[Row]:
    """Yield the rows of one architecture and data type. In bfloat16, the limits are relative to the CPU's errors."""
    found = {device: _distances(build(folder, device, dtype), batch, said, exact) for device in ("cpu", DEVICE)}
    bounds = (NATS, RELATIVE, STEP) if dtype == "float32" else tuple(BFLOAT * off for off in found["cpu"])
    names = ("log-probs, rms off float64", "gradient off float64", "step off float64")
    units = ("nats", "relative", "relative")
    for what, unit, off, own, bound in zip(names, units, found[DEVICE], found["cpu"], bounds, strict=True):
        yield check_at_most(f"{name}: {what} (processor {own:.2g})", off, bound, unit)


def _distances(
    learner: TorchLearner, batch: TrajectoryBatch, said: torch.Tensor, exact: Stepped
) -> tuple[float, float, float]:
    logp = torch.tensor(learner.logprobs(TOKENS))
    stepped = step_once(learner, batch)
    rms = float((logp - said).double().square().mean().sqrt())
    return rms, distance(stepped.gradients, exact.gradients), distance(stepped.change, exact.change)


def _objective(name: str, keys: Mapping[str, Any]) -> Iterator[Row]:
    """Compare gradient and step of another objective, in float32 on both devices."""
    with policy_folder("llama") as folder:
        own = build(folder, "cpu", **keys)
        batch = make_batch(BatchShape(), own.logprobs)
        exact = step_once(own, batch)
        found = step_once(build(folder, DEVICE, **keys), batch)
    yield check_at_most(f"{name}: gradient off the processor's", distance(found.gradients, exact.gradients), RELATIVE)
    yield check_at_most(f"{name}: step off the processor's", distance(found.change, exact.change), STEP)


def run_state() -> Iterator[Row]:
    """Save a learner's state on the GPU, load it on the CPU, and the other way round."""
    cases: dict[str, tuple[str, dict[str, Any]]] = {
        "float32": ("float32", {}),
        "bfloat16, masters": ("bfloat16", {}),
        "deterministic": ("float32", {"deterministic": True}),
        "LoRA": ("float32", {"lora": {"rank": 4}}),
        "critic and reference": (
            "float32",
            {"objective": {"kind": "ppo", "penalties": {"kl_to": "reference", "kl_weight": 0.1}}},
        ),
    }
    for name, (dtype, keys) in cases.items():
        yield from guard(name, partial(_moved, name, dtype, keys))
    torch.use_deterministic_algorithms(False)


def _moved(name: str, dtype: str, keys: Mapping[str, Any]) -> Iterator[Row]:
    with policy_folder("qwen2") as folder:
        for here, there in ((DEVICE, "cpu"), ("cpu", DEVICE)):
            way = f"{name}, {_called(here)} to {_called(there)}"
            first = build(folder, here, dtype, **keys)
            batch = make_batch(BatchShape())
            for version in range(2):
                first.step(batch, version)
            weights, state = _files(first)
            second = build(folder, there, dtype, **keys)
            second.step(batch, 0)  # the learner takes a step on other data; loading must replace the state of this step
            second.load(weights, state)
            own_weights, own_state = _files(second)
            yield check_at_most(f"{way}: moments and generators that differ", _apart_in(own_state, state), 0, "tensors")
            if "lora" not in keys:
                yield check_at_most(f"{way}: weights that differ", _apart_in(own_weights, weights), 0, "tensors")
            else:  # devices round the sum of weight and adapter differently
                off = distance(from_files(own_weights), from_files(weights))
                yield check_at_most(f"{way}: weights, off what was stored", off, ROUNDED, "relative")
            one, other = step_once(first, batch, 2), step_once(second, batch, 2)
            bound = BACK[dtype]
            yield check_at_most(
                f"{way}: the next gradient", distance(other.gradients, one.gradients), bound, "relative"
            )


def _called(device: str) -> str:
    return "GPU" if device == "cuda" else "processor"


def _files(learner: TorchLearner) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Return weights and state as stored files."""
    found = (
        {name: b"".join(split_buffers(data)) for name, data in files.items()}
        for files in (learner.weights(), learner.state())
    )
    weights, state = found
    return weights, state


def _apart_in(own: Mapping[str, bytes], given: Mapping[str, bytes]) -> int:
    """List the tensors that differ, except the state of the other device's random generator."""
    one, other = from_files(own), from_files(given)
    names = (one.keys() | other.keys()) - {DEVICE_RNG}
    return sum(not (name in one and name in other and torch.equal(one[name], other[name])) for name in names)


def run_deterministic() -> Iterator[Row]:
    """Train twice with `train.deterministic`, with every objective, and with a policy whose vocabulary has 151,936
    tokens.
    """
    yield from guard("a larger policy", _large_twice)
    for name, keys in OBJECTIVES.items():
        yield from guard(f"{name}, deterministic", partial(_twice, name, {**keys, "deterministic": True}))
    yield from guard("gemma2, deterministic", partial(_twice, "gemma2", {"deterministic": True}, kind="gemma2"))
    torch.use_deterministic_algorithms(False)


def _twice(name: str, keys: Mapping[str, Any], kind: str = "llama") -> Iterator[Row]:
    with policy_folder(kind, "bfloat16") as folder:
        apart = _apart(folder, "bfloat16", make_batch(BatchShape()), keys)
    yield check_at_most(f"{name}: elements that differ between two runs", apart, 0)


def _large_twice() -> Iterator[Row]:
    if not GPU:
        yield Row("a larger policy twice", NO_GPU)
        return
    with policy_folder("qwen2", "bfloat16", **{**QWEN_05B, "num_hidden_layers": 4}) as folder:
        batch = make_batch(BatchShape(8, 4, QWEN_05B["vocab_size"], (32, 96), 128, 0.6, 400))
        apart = _apart(folder, "bfloat16", batch, {"deterministic": True})
        yield check_at_most("4 layers, V = 151,936: elements that differ between two runs", apart, 0)
        apart = _apart(folder, "bfloat16", batch, {"deterministic": False})
        yield Row("the same without deterministic", apart, "elements")


def _apart(folder: Path, dtype: str, batch: TrajectoryBatch, keys: Mapping[str, Any]) -> int:
    """Train two versions twice. Return how many elements of weights, masters and moments differ."""
    runs = []
    for _ in range(2):
        learner = build(folder, DEVICE, dtype, **keys)
        for version in range(2):
            learner.step(batch, version)
        runs.append({n: t.clone() for n, t in {**learner.policy.weights(), **learner.policy.tensors()}.items()})
        del learner
        clear_memory()
    return sum(int((runs[0][name] != runs[1][name]).sum()) for name in runs[0])
