"""Checks on a GPU whether the results of the transformers engine, bit for bit, depend on the state of its process.

Several engines answer the same requests in one process, one after the other. Between two engines, the state of the
process is changed. Each engine is compared with the first one: its responses, and the inputs and outputs of its model's
modules in the first forward passes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_engine import KEYS, TINY, count_differences, generate_all, make_requests, start_engine
from benchmarks.gpu_models import DEVICE, GPU, QWEN_05B, BatchShape, build, clear_memory, make_batch, policy_folder
from benchmarks.gpu_rows import Row, check_that
from rollflow.tasks.engines import fixed_shape
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.policies.device import WORKSPACE, fix_workspace

PASSES = 40  # forward passes whose modules are compared; they reach beyond position 64, where differences were seen


@dataclass(frozen=True, slots=True)
class Made:
    """The responses of an engine, and a digest of each tensor that entered or left a module."""

    generations: Sequence[Generation]
    digests: Mapping[str, int]


def run_bits() -> Iterator[Row]:
    """Report which changes of the process's state change the engine's results."""
    sizes = QWEN_05B if GPU else TINY
    count, tokens = (128, 96) if GPU else (6, 6)  # on a GPU, groups of 256 keys, for which cuDNN's bits differ
    given = os.environ.pop(WORKSPACE, None)
    try:
        with (
            policy_folder("qwen2", "bfloat16", **sizes) as folder,
            mock.patch.object(fixed_shape, "fix_workspace"),
        ):
            requests = make_requests(count, sizes["vocab_size"], 48, tokens)
            yield from _compare(folder, requests, sizes["vocab_size"])
    finally:
        torch.use_deterministic_algorithms(False)
        if given is not None:
            os.environ[WORKSPACE] = given


def _compare(folder: Path, requests: Sequence[GenerationRequest], vocabulary: int) -> Iterator[Row]:
    first = _generate(folder, requests)
    second = _generate(folder, requests)
    yield check_that("a second engine: the same bits", second == first)
    yield from _differences("a second engine", first, second)
    yield from _with_cudnn(folder, requests)
    batch = make_batch(BatchShape(4, 4, vocabulary))
    changes: Mapping[str, Callable[[], Any]] = {
        "after a learner": lambda: build(folder, DEVICE, "bfloat16").step(batch, 0),
        f"after {WORKSPACE} is set": fix_workspace,
        "after a deterministic learner": lambda: build(folder, DEVICE, "bfloat16", **KEYS).step(batch, 0),
    }
    for name, change in changes.items():
        change()
        clear_memory()
        yield from _differences(name, first, _generate(folder, requests))
    torch.use_deterministic_algorithms(False)


def _with_cudnn(folder: Path, requests: Sequence[GenerationRequest]) -> Iterator[Row]:
    """Compare two engines that may use cuDNN's attention. The engine normally turns it off, so that its results are
    reproducible.
    """
    with mock.patch.object(fixed_shape, "turn_off_cudnn_attention"):
        torch.backends.cuda.enable_cudnn_sdp(True)
        first, second = _generate(folder, requests), _generate(folder, requests)
    yield from _differences("a second engine with cuDNN's attention", first, second)


def _differences(name: str, first: Made, made: Made) -> Iterator[Row]:
    pairs = list(zip(first.generations, made.generations, strict=True))
    yield from count_differences(name, first.generations, made.generations)
    gaps = [abs(a.logprobs[0] - b.logprobs[0]) for a, b in pairs]
    yield Row(f"{name}: log-probs of first tokens differ by at most", max(gaps), "nats")
    where = next((place for place, value in first.digests.items() if made.digests.get(place) != value), "nothing")
    yield Row(f"{name}: first of the model that differs", where)


def _generate(folder: Path, requests: Sequence[GenerationRequest]) -> Made:
    made = asyncio.run(_generated(folder, requests))
    clear_memory()
    return made


async def _generated(folder: Path, requests: Sequence[GenerationRequest]) -> Made:
    engine = await start_engine(folder, "bfloat16", DEVICE)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)  # torch cannot sum probabilities deterministically
    try:
        with _watched(engine._sampler._model) as digests:
            made = await generate_all(engine, requests)
        return Made(made, {place: int(value) for place, value in digests.items()})
    finally:
        torch.use_deterministic_algorithms(was)
        await engine.close()


@contextmanager
def _watched(model: Any) -> Iterator[dict[str, Tensor]]:
    """Collect digests of the inputs and outputs of each leaf module in the first forward passes, in their order, by
    module and pass.
    """
    found: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def keep(name: str, given: tuple[Any, ...], output: Any) -> None:
        number = counts[name] = counts.get(name, -1) + 1
        if number >= PASSES:
            return
        for what, tensor in (("in", given[0] if given else None), ("out", output)):
            if isinstance(tensor, Tensor):
                found[f"{name} {what}, pass {number}"] = _digest(tensor)

    hooks = [
        module.register_forward_hook(lambda _, given, output, name=name: keep(name, given, output))
        for name, module in model.named_modules()
        if not list(module.children())
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _digest(tensor: Tensor) -> Tensor:
    """Return a sum of a tensor's bit patterns, weighted by position. A sum of integers does not depend on the order of
    addition.
    """
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = tensor.detach().contiguous().view(kinds[tensor.element_size()]).flatten().long()
    return (bits * (torch.arange(len(bits), device=bits.device) % 1_000_003 + 1)).sum()
