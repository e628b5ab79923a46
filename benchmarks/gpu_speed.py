"""Measures speed on a GPU: the device, a train step against a plain loop, and the engine against `model.generate`.

The tokens/s of a step include the tokens of prompts and responses; those of generation include only responses. A time
is the median of some steps after one warm-up step. Shapes: R rows, T padded tokens, V vocabulary.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gpu_engine import generate_all, make_requests, start_engine
from benchmarks.gpu_models import (
    DEVICE,
    GB,
    GPU,
    QWEN_05B,
    SMALL,
    BatchShape,
    Peak,
    build,
    clear_memory,
    make_batch,
    policy_folder,
    wait,
)
from benchmarks.gpu_rows import NO_GPU, Row, check_at_most, guard, target_at_least
from rollflow.storage.batch import TrajectoryBatch
from rollflow.tasks.engines import fixed_shape
from rollflow.tasks.engines.fixed_shape import Shape
from rollflow.tasks.learners.forward import token_logprobs
from rollflow.tasks.learners.torch_learner import load_model

TIMED = 3 if GPU else 1  # the number of timed steps
MICRO = 8192 if GPU else 256  # the number of padded tokens in a pass
AS_PLAIN = 1.0  # target of rollflow's tokens/s, as a multiple of the plain loop's tokens/s
LOSS = 1e-2  # relative limit of the difference between two losses in bfloat16
SIZES: Mapping[str, Any] = QWEN_05B if GPU else SMALL
BATCH = BatchShape(16, 8, SIZES["vocab_size"], (48, 80), 224, 0.5, 640) if GPU else BatchShape()


def run_card() -> Iterator[Row]:
    """Report the device and its speed."""
    import transformers

    yield Row("torch", torch.__version__)
    yield Row("transformers", transformers.__version__)
    yield Row("float32 products in TF32", str(torch.backends.cuda.matmul.allow_tf32))
    if not GPU:
        yield Row("the card", NO_GPU)
        return
    given = torch.cuda.get_device_properties(0)
    yield Row("card", given.name)
    yield Row("memory", given.total_memory / GB, "GB")
    yield from guard("driver", _driver)
    for dtype in (torch.float32, torch.bfloat16):
        yield from guard("matrix products", partial(_products, dtype))
    yield from guard("copies", _copies)
    yield from guard("launches", _launches)


def _driver() -> Iterator[Row]:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    yield Row("driver", said)


def _products(dtype: torch.dtype) -> Iterator[Row]:
    size = 8192
    one, other = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    seconds = time_median(lambda: one @ other, 5)
    yield Row(
        f"products of 8,192 x 8,192, {str(dtype).removeprefix('torch.')}", 2 * size**3 / seconds / 1e12, "TFLOP/s"
    )


def _copies() -> Iterator[Row]:
    source = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    yield Row("memory bandwidth, read and write", 2 * 2**30 / time_median(lambda: target.copy_(source), 5) / GB, "GB/s")
    host = torch.empty(2**28, dtype=torch.uint8)
    yield Row("to the processor, pageable", 2**28 / time_median(lambda: host.copy_(source[: 2**28]), 3) / GB, "GB/s")


def _launches() -> Iterator[Row]:
    small = torch.zeros(8, device=DEVICE)

    def many() -> None:
        for _ in range(1000):
            small.add_(1.0)

    yield Row("a small launch", 1e6 * time_median(many, 3) / 1000, "us")


def time_median(act: Callable[[], Any], times: int) -> float:
    """Return the median seconds of some runs after one warm-up run."""
    act()
    found = []
    for _ in range(times):
        wait()
        began = time.perf_counter()
        act()
        wait()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def run_speed() -> Iterator[Row]:
    """Time rollflow's train step and a plain loop over the same rows and micro-batches."""
    batch = make_batch(BATCH)
    with policy_folder("qwen2", "bfloat16", **SIZES) as folder:
        found: dict[str, tuple[float, float]] = {}  # side -> (tokens/s, loss)
        yield from guard("plain loop", partial(_plain_rows, folder, batch, found))
        sides: dict[str, dict[str, Any]] = {
            "rollflow, same micro-batches": {"share_prefixes": "none"},
            "rollflow": {},
            f"rollflow, {2 * MICRO:,} tokens at a time": {"micro_tokens": 2 * MICRO},
        }
        for name, keys in sides.items():
            yield from guard(name, partial(_own_rows, name, folder, batch, found, keys))
        for times in (8, 32) if GPU else ():
            name = f"rollflow, same micro-batches, chunks of {64 * times} MiB"
            yield from guard(name, partial(_chunked, name, folder, batch, found, times))
        if GPU:
            yield from guard("profile", partial(_profile, folder, batch))


def _own_rows(
    name: str, folder: Path, batch: TrajectoryBatch, found: dict[str, tuple[float, float]], keys: Mapping[str, Any]
) -> Iterator[Row]:
    seconds, loss, peak = _time_learner(folder, batch, keys)
    clear_memory()
    found[name] = tokens_of(batch) / seconds, loss
    yield Row(f"{name}: tokens/s", found[name][0])
    yield Row(f"{name}: peak", peak.whole / GB, "GB") if GPU else Row(f"{name}: peak", NO_GPU)
    if "plain" in found:
        speed, plain = found["plain"]
        yield target_at_least(f"{name}: tokens/s over the plain loop's", found[name][0] / speed, AS_PLAIN)
        off = abs(loss - plain) / max(abs(plain), 0.1)
        yield check_at_most(f"{name}: loss off the plain loop's", off, LOSS, "relative")


def _time_learner(folder: Path, batch: TrajectoryBatch, keys: Mapping[str, Any]) -> tuple[float, float, Peak]:
    """Return the seconds of a step, the loss of the first step, and the peak memory."""
    learner = build(folder, DEVICE, "bfloat16", **{"micro_tokens": MICRO, "learning_rate": 1e-6, **keys})
    losses: list[float] = []
    with Peak() as peak:
        seconds = time_median(lambda: losses.append(learner.step(batch, len(losses))["loss"]), TIMED)
    return seconds, losses[0], peak


def _chunked(
    name: str, folder: Path, batch: TrajectoryBatch, found: dict[str, tuple[float, float]], times: int
) -> Iterator[Row]:
    """Measure like `_own_rows`, but with chunks of logits that are `times` times as large as on a CPU."""
    with mock.patch.object(token_logprobs, "ON_GPU", times):
        yield from _own_rows(name, folder, batch, found, {"share_prefixes": "none"})


def tokens_of(batch: TrajectoryBatch) -> int:
    """Count the tokens of all rows, including prompts."""
    return sum(len(tokens) for tokens in batch.table["tokens"].to_pylist())


def _plain_rows(folder: Path, batch: TrajectoryBatch, found: dict[str, tuple[float, float]]) -> Iterator[Row]:
    seconds, loss, peak = _time_plain(folder, batch)
    clear_memory()
    found["plain"] = tokens_of(batch) / seconds, loss
    yield Row("plain loop: tokens/s", found["plain"][0])
    yield Row("plain loop: peak", peak.whole / GB, "GB") if GPU else Row("plain loop: peak", NO_GPU)


def _time_plain(folder: Path, batch: TrajectoryBatch) -> tuple[float, float, Peak]:
    """Time the plain loop in the same way as `_time_learner` times the learner."""
    loop, losses = PlainLoop(folder, batch), list[float]()
    with Peak() as peak:
        seconds = time_median(lambda: losses.append(loop.step()), TIMED)
    return seconds, losses[0], peak


class PlainLoop:
    """A hand-written train step: transformers in bfloat16, float32 masters with fused AdamW, GRPO's clipped loss."""

    def __init__(self, folder: Path, batch: TrajectoryBatch) -> None:
        self._model = load_model(folder, "bfloat16", trained=True).to(DEVICE).eval()
        self._own = list(self._model.parameters())
        self._masters = [p.detach().float() for p in self._own]
        self._adamw = torch.optim.AdamW(self._masters, lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        groups = batch.groups()
        self._rows = sorted((row for group in groups for row in _rows_of(group)), key=lambda row: -len(row[0]))
        self._tokens = sum(int(row[1].sum()) for row in self._rows)

    def step(self) -> float:
        """Take one optimizer step, and return the loss."""
        total, begin = torch.zeros((), device=DEVICE), 0
        for master in self._masters:
            master.grad = None
        while begin < len(self._rows):
            count = max(1, MICRO // len(self._rows[begin][0]))
            total += self._backward(self._rows[begin : begin + count])
            begin += count
        torch.nn.utils.clip_grad_norm_(self._masters, 1.0)
        self._adamw.step()
        with torch.no_grad():
            torch._foreach_copy_(self._own, self._masters)
        return float(total)

    def _backward(self, rows: list[tuple[Tensor, ...]]) -> Tensor:
        ids_RT, mask_RT, old_RT, gain_RT = (pad_sequence([row[n] for row in rows], True).to(DEVICE) for n in range(4))
        logits_RTV = self._model(input_ids=ids_RT, use_cache=False).logits[:, :-1]
        logp_RT = torch.log_softmax(logits_RTV.float(), -1).gather(-1, ids_RT[:, 1:, None]).squeeze(-1)
        ratio_RT = (logp_RT - old_RT[:, 1:]).exp()
        gain_RT, mask_RT = gain_RT[:, 1:], mask_RT[:, 1:]
        held_RT = torch.minimum(ratio_RT * gain_RT, ratio_RT.clamp(0.8, 1.28) * gain_RT)
        loss = -(held_RT * mask_RT).sum() / self._tokens
        loss.backward()  # type: ignore[no-untyped-call]
        for own, master in zip(self._own, self._masters, strict=True):
            assert own.grad is not None
            master.grad = own.grad.float() if master.grad is None else master.grad.add_(own.grad)
            own.grad = None
        return loss.detach()


def _rows_of(group: Any) -> Iterator[tuple[Tensor, ...]]:
    """Return tokens, mask, behaviour log-probs and advantages of each row."""
    rewards = torch.tensor([t.reward for t in group.trajectories], dtype=torch.float64)
    gains = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    for t, gain in zip(group.trajectories, gains.tolist(), strict=True):
        tokens, mask = torch.tensor(t.tokens), torch.tensor(t.loss_mask)
        yield tokens, mask.float(), torch.tensor(t.logprobs), torch.full((len(tokens),), gain)


def _profile(folder: Path, batch: TrajectoryBatch) -> Iterator[Row]:
    """Profile a train step, and report how its time on the device is spent."""
    from torch.profiler import ProfilerActivity, profile

    learner = build(folder, DEVICE, "bfloat16", micro_tokens=MICRO, share_prefixes="none")
    learner.step(batch, 0)
    yield Row("profile: waits for the device in a step", float(_count_waits(lambda: learner.step(batch, 1))))
    with Peak() as peak, profile(activities=[ProfilerActivity.CUDA]) as seen:
        learner.step(batch, 2)
        wait()
    events = [event for event in seen.key_averages() if event.self_device_time_total]
    busy = sum(event.self_device_time_total for event in events) / 1e6
    yield Row("profile: step, with the profiler", peak.seconds, "s")
    yield Row("profile: device busy", busy, "s")
    yield Row("profile: kernels and copies", float(sum(event.count for event in events)))
    for event in sorted(events, key=lambda event: -event.self_device_time_total)[:10]:
        yield Row(f"profile: {event.count} x {event.key[:60]}", event.self_device_time_total / 1e3, "ms")


def _count_waits(act: Callable[[], Any]) -> int:
    """Count how often the CPU waits for the device, as torch reports it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            act()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)


def run_generation() -> Iterator[Row]:
    """Time the transformers engine and `model.generate` for the same prompts and lengths."""
    count, tokens = (256, 128) if GPU else (8, 8)
    with policy_folder("qwen2", "bfloat16", **SIZES) as folder:
        speeds: dict[str, float] = {}
        yield from guard("model.generate", partial(_generate_plainly, folder, count, tokens, speeds))
        shapes = {"engine": fixed_shape.ON_GPU}
        if GPU:
            shapes["engine, prefill of 16 rows"] = Shape(256, 16, 64)
            shapes["engine, a processor's groups of 64 rows"] = fixed_shape.ON_CPU
        for name, shape in shapes.items():
            yield from guard(name, partial(_generate, name, folder, count, tokens, speeds, shape))


def _generate(
    name: str, folder: Path, count: int, tokens: int, speeds: Mapping[str, float], shape: Shape
) -> Iterator[Row]:
    with mock.patch.object(fixed_shape, "ON_GPU", shape):
        made, seconds, peak = asyncio.run(_generated(folder, count, tokens))
    clear_memory()
    yield Row(f"{name}: tokens/s", made / seconds)
    yield Row(f"{name}: peak", peak / GB, "GB") if GPU else Row(f"{name}: peak", NO_GPU)
    if "plain" in speeds:
        yield target_at_least(f"{name}: tokens/s over model.generate's", made / seconds / speeds["plain"], AS_PLAIN)


async def _generated(folder: Path, count: int, tokens: int) -> tuple[int, float, int]:
    engine = await start_engine(folder, "bfloat16", DEVICE, slots=count)
    try:
        await generate_all(engine, make_requests(count, SIZES["vocab_size"], 64, 8))
        with Peak() as peak:
            made = await generate_all(engine, make_requests(count, SIZES["vocab_size"], 64, tokens))
        return sum(len(generation.tokens) for generation in made), peak.seconds, peak.whole
    finally:
        await engine.close()


def _generate_plainly(folder: Path, count: int, tokens: int, speeds: dict[str, float]) -> Iterator[Row]:
    """Generate with transformers alone, without log-probs."""
    made, peak = _time_generate(folder, count, tokens)
    clear_memory()
    speeds["plain"] = made / peak.seconds
    yield Row("model.generate: tokens/s", speeds["plain"])
    yield Row("model.generate: peak", peak.whole / GB, "GB") if GPU else Row("model.generate: peak", NO_GPU)


def _time_generate(folder: Path, count: int, tokens: int) -> tuple[int, Peak]:
    """Return the number of generated tokens, the time and the peak memory."""
    model = load_model(folder, "bfloat16", trained=True).to(DEVICE).eval()
    prompts = torch.randint(2, SIZES["vocab_size"], (count, 64), device=DEVICE)
    ways = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "pad_token_id": 0}

    @torch.no_grad()
    def generate(new: int) -> int:
        seen = torch.ones_like(prompts)
        made = model.generate(prompts, attention_mask=seen, max_new_tokens=new, min_new_tokens=new, **ways)
        return int(made[:, 64:].numel())

    generate(8)
    with Peak() as peak:
        made = generate(tokens)
    return made, peak
