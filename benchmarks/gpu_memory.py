"""Measures the GPU memory of a large vocabulary's output head, of a train step, and of recomputed activations.

Shapes: M tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_models import (
    DEVICE,
    GB,
    GPU,
    QWEN_05B,
    BatchShape,
    Peak,
    build,
    clear_memory,
    make_batch,
    policy_folder,
)
from benchmarks.gpu_rows import NO_GPU, Row, check_at_least, check_at_most, guard, target_at_most
from rollflow.tasks.learners.forward.token_logprobs import TokenLogprobs
from rollflow.tasks.learners.torch_learner import TorchLearner

ENTROPY = 0.1
WORSE = {torch.float32: 1.5, torch.bfloat16: 2.0}  # limit, as a multiple of the plain formula's error
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-3}  # errors below this value pass in any case
HEAD_SHARE = 0.5  # limit of the head's memory, as a fraction of the plain formula's memory
NEAR = 0.03  # limit of the relative difference between the bytes that are kept and the formula
WORKSPACE = 5e7  # bytes that libraries may allocate for themselves
LARGE_BATCH = BatchShape(8, 8, QWEN_05B["vocab_size"], (48, 80), 160, 0.5, 448)
Way = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # (hidden states, targets) -> (log-probs, entropies)


def run_head() -> Iterator[Row]:
    """Compare rollflow's chunked output head with the plain formula, at V = 151,936."""
    for dtype in (torch.float32, torch.bfloat16):
        yield from guard(f"head, {dtype}", partial(_head, dtype))


def _head(dtype: torch.dtype) -> Iterator[Row]:
    sizes = {**QWEN_05B, "num_hidden_layers": 1} if GPU else {"vocab_size": 4096, "num_hidden_layers": 1}
    name = str(dtype).removeprefix("torch.")
    with policy_folder("qwen2", name, **sizes) as folder:
        model = _load(folder, name)
    logprobs, weight = TokenLogprobs(model), model.get_output_embeddings().weight
    ways: dict[str, Way] = {"rollflow": partial(_own, logprobs), "plain": partial(_plain, weight)}
    exact = _exact(weight, 1024)
    off = {
        way: [_off(a, b) for a, b in zip(_values(run, weight, 1024), exact, strict=True)] for way, run in ways.items()
    }
    names = ("log-probs", "entropies", "gradient of hidden states", "gradient of the head")
    for n, what in enumerate(names):
        bound = max(WORSE[dtype] * off["plain"][n], FLOOR[dtype])
        title = f"{name}, {what} off float64 (plain {off['plain'][n]:.2g})"
        yield check_at_most(title, off["rollflow"][n], bound, "relative")
    if not GPU:
        yield Row(f"{name}, peak memory of the head", NO_GPU)
        return
    del exact
    clear_memory()
    peaks = {way: _peak_of(run, weight, 4096) for way, run in ways.items()}
    for way, peak in peaks.items():
        yield Row(f"{name}, M = 4,096: {way}, peak above the weights", peak.added / GB, "GB")
        yield Row(f"{name}, M = 4,096: {way}, forward and backward", 1e3 * peak.seconds, "ms")
    share = peaks["rollflow"].added / peaks["plain"].added
    yield check_at_most(f"{name}, M = 4,096: peak over the plain way's", share, HEAD_SHARE)


def _load(folder: Path, name: str) -> Any:
    from rollflow.tasks.learners.torch_learner import load_model

    return load_model(folder, name, trained=True).to(DEVICE).eval()


def _own(logprobs: TokenLogprobs, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    with logprobs.add_in_place():
        logp_M, entropy_M = logprobs.of(hidden_MH, targets_M, entropy=True)
        assert entropy_M is not None
        (logp_M.mean() + ENTROPY * entropy_M.mean()).backward()  # type: ignore[no-untyped-call]
    return logp_M.detach(), entropy_M.detach()


def _plain(weight_VH: Tensor, hidden_MH: Tensor, targets_M: Tensor) -> tuple[Tensor, Tensor]:
    """Compute log-probs, entropies and gradients by the plain formula, which needs all logits at once."""
    logits_MV = torch.nn.functional.linear(hidden_MH, weight_VH)
    logits_MV = logits_MV if logits_MV.dtype == torch.float64 else logits_MV.float()
    all_MV = torch.log_softmax(logits_MV, -1)
    logp_M = all_MV.gather(1, targets_M[:, None]).squeeze(1)
    entropy_M = -(all_MV.exp() * all_MV).sum(-1)
    (logp_M.mean() + ENTROPY * entropy_M.mean()).backward()  # type: ignore[no-untyped-call]
    return logp_M.detach(), entropy_M.detach()


def _exact(weight_VH: Tensor, count: int) -> list[Tensor]:
    """Compute the result of `_values` by the plain formula in float64."""
    wide_VH = weight_VH.detach().double().requires_grad_()
    return _values(partial(_plain, wide_VH), wide_VH, count, given=weight_VH)


def _values(way: Way, weight_VH: Tensor, count: int, given: Tensor | None = None) -> list[Tensor]:
    """Return log-probs, entropies, and the gradients of hidden states and head. The hidden states are rounded to the
    type of `given`.
    """
    hidden_MH, targets_M = _asked(weight_VH if given is None else given, count)
    hidden_MH = hidden_MH.to(weight_VH.dtype).requires_grad_()
    weight_VH.grad = None
    logp_M, entropy_M = way(hidden_MH, targets_M)
    assert hidden_MH.grad is not None
    assert weight_VH.grad is not None
    found = [logp_M, entropy_M, hidden_MH.grad, weight_VH.grad]
    weight_VH.grad = None
    return [part.double() for part in found]


def _asked(weight_VH: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Draw hidden states (like those after the last norm) and targets from a seed."""
    draw = torch.Generator().manual_seed(0)
    hidden_MH = torch.randn(count, weight_VH.shape[1], generator=draw).to(weight_VH)
    return hidden_MH, torch.randint(len(weight_VH), (count,), generator=draw).to(weight_VH.device)


def _off(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def _peak_of(way: Way, weight_VH: Tensor, count: int) -> Peak:
    """Return the peak memory of the last of three runs."""
    for _ in range(3):
        hidden_MH, targets_M = _asked(weight_VH, count)
        weight_VH.grad = None
        with Peak() as peak:
            way(hidden_MH.requires_grad_(), targets_M)
    weight_VH.grad = None
    clear_memory()
    return peak


def run_memory() -> Iterator[Row]:
    """Measure the memory of a step with Qwen2.5-0.5B's shape, and compare it with the formula of the kept tensors."""
    if not GPU:
        yield Row("memory of a step, Qwen2.5-0.5B's shape", NO_GPU)
        return
    with policy_folder("qwen2", "bfloat16", **QWEN_05B) as folder:
        yield from guard("bfloat16, masters", partial(_split, "bfloat16, masters", folder, {}))
        yield from guard("LoRA of rank 16", partial(_split, "LoRA of rank 16", folder, {"lora": {"rank": 16}}))


def _split(name: str, folder: Path, keys: Mapping[str, Any]) -> Iterator[Row]:
    clear_memory()
    warm = torch.ones(64, 64, dtype=torch.bfloat16, device=DEVICE)
    warm = torch.nn.functional.linear(warm, warm, warm[0])  # allocates workspaces of matrix products
    base = torch.cuda.memory_allocated()
    learner = build(folder, DEVICE, "bfloat16", micro_tokens=4096, **keys)
    built, batch = torch.cuda.memory_allocated() - base, make_batch(LARGE_BATCH)
    learner.step(batch, 0)
    kept = torch.cuda.memory_allocated() - base
    clipped, peak = _watched_step(learner, batch)
    whole = sum(p.numel() for p in learner.model.parameters())
    trained = sum(p.numel() for p in learner.policy.trained.parameters.values())
    untrained = whole - trained if keys else whole  # the parameters of an adapter need no separate masters
    masters, moments = 4 * trained, 8 * trained
    gradients, weights = 4 * trained, 2 * untrained
    rows = {
        "weights and masters": (built, weights + masters),
        "moments": (kept - built, moments),
        "gradients": (clipped - base - kept, gradients),
    }
    for what, (found, formula) in rows.items():
        title = f"{name}: {what} (formula {formula / GB:.3f})"
        bound = max(NEAR * formula, WORKSPACE) / GB
        yield Row(title, found / GB, "GB")
        yield check_at_most(f"{name}: {what}, off the formula", abs(found - formula) / GB, bound, "GB")
    rest = peak.whole - base - kept - (clipped - base - kept)
    yield Row(f"{name}: the rest at the peak (activations, logits, micro-batch)", rest / GB, "GB")
    yield Row(f"{name}: peak of a step, 4,096 tokens at a time", (peak.whole - base) / GB, "GB")
    yield Row(f"{name}: peak over what is kept and the gradients", (peak.whole - base) / max(1, clipped - base), "")
    yield Row(f"{name}: reserved from the driver", torch.cuda.memory_reserved() / GB, "GB")


def _watched_step(learner: TorchLearner, batch: Any) -> tuple[int, Peak]:
    """Return the bytes in use when the gradient is complete, and the peak memory of the step."""
    seen: list[int] = []
    clip = learner.policy.clip

    def watch() -> float:
        seen.append(torch.cuda.memory_allocated())
        return clip()

    with mock.patch.object(learner.policy, "clip", watch), Peak() as peak:
        learner.step(batch, 1)
    return seen[0], peak


def run_recompute() -> Iterator[Row]:
    """Check that training with recomputed activations has the same gradient as with stored activations, and needs less
    memory.
    """
    sizes = {**QWEN_05B, "num_hidden_layers": 12} if GPU else {}
    batch = make_batch(LARGE_BATCH if GPU else BatchShape())
    found: dict[bool, tuple[dict[str, Tensor], Peak]] = {}
    with policy_folder("qwen2", "bfloat16", **sizes) as folder:
        for again in (False, True):
            keys = {"checkpoint_activations": again, "deterministic": True, "micro_tokens": 8192}
            learner = build(folder, DEVICE, "bfloat16", **keys)
            learner.step(batch, 0)
            gradients: dict[str, Tensor] = {}
            clip = learner.policy.clip
            with mock.patch.object(learner.policy, "clip", partial(_keep, learner, gradients, clip)):
                learner.step(batch, 1)
            with Peak() as peak:
                learner.step(batch, 2)
            found[again] = gradients, peak
            del learner
            clear_memory()
    torch.use_deterministic_algorithms(False)
    one, other = found[False][0], found[True][0]
    apart = sum(int((one[name] != other[name]).sum()) for name in one)
    yield check_at_most("elements of the gradient that differ", apart, 0)
    yield check_at_least("elements of the gradient", sum(part.numel() for part in one.values()), 1)
    if not GPU:
        yield Row("memory with and without", NO_GPU)
        return
    kept, again_peak = (found[way][1] for way in (False, True))
    yield Row("step's peak above what is kept, activations kept", kept.added / GB, "GB")
    yield Row("step's peak above what is kept, activations recomputed", again_peak.added / GB, "GB")
    yield check_at_most("memory recomputed over kept", again_peak.added / kept.added, 0.9)
    yield target_at_most("time recomputed over kept", again_peak.seconds / kept.seconds, 1.5)


def _keep(learner: TorchLearner, gradients: dict[str, Tensor], clip: Callable[[], float]) -> float:
    """Copy the gradients to the CPU before they are clipped."""
    given = learner.policy.trained.parameters.items()
    gradients.update({name: p.grad.cpu() for name, p in given if p.grad is not None})
    return clip()
