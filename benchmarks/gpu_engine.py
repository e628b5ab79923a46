"""Checks the transformers engine on a GPU against the learner, and alternates engine and learner on one device."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

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
    placed,
    policy_folder,
)
from benchmarks.gpu_rows import NO_GPU, Row, check_at_most, check_that, guard, target_at_most
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.base import split_buffers
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import TransformersEngineConfig
from rollflow.tasks.engines.transformers import TransformersEngine
from rollflow.tasks.learners.torch_learner import TorchLearner

TOLERANCE = {"float32": 0.01, "bfloat16": 1.0}  # the default tolerance of the probe, in nats
MEAN = {"float32": 1e-4, "bfloat16": 0.05}  # limit of the mean difference of log-probs over all tokens, in nats
TOGETHER = 1.15  # limit of the peak memory in turns, as a multiple of the larger peak of engine and learner alone
KEYS = {"deterministic": True, "micro_tokens": 4096}
TINY: Mapping[str, Any] = {"vocab_size": 512, "initializer_range": 0.2}  # makes token probabilities very different


def make_requests(count: int, vocabulary: int, prompt: int, tokens: int) -> list[GenerationRequest]:
    """Create requests with different prompts and different seeds."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(2, vocabulary, (count, prompt), generator=draw).tolist()
    return [
        GenerationRequest(f"r{n}", ModelInput.of(given[: prompt - n % 8]), tokens, seed=n)
        for n, given in enumerate(prompts)
    ]


async def start_engine(folder: Path, dtype: str, device: str, slots: int = 256) -> TransformersEngine:
    """Start an engine whose version 0 has the weights in the folder."""
    engine = TransformersEngine(TransformersEngineConfig(max_concurrent_requests=slots), folder, dtype=dtype)  # type: ignore[arg-type]
    with placed(device):
        await engine.start()
    await update_engine(engine, 0, folder)
    return engine


async def update_engine(engine: TransformersEngine, version: int, folder: Path) -> None:
    """Load the weights of a version into the engine."""
    await engine.suspend("continue")
    await engine.update(version, folder)
    await engine.resume()


async def generate_all(engine: TransformersEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
    """Generate all responses concurrently."""
    return list(await asyncio.gather(*map(engine.generate, requests)))


def count_differences(what: str, first: Sequence[Generation], made: Sequence[Generation]) -> Iterator[Row]:
    """Yield rows that describe how two sets of responses differ: the number of responses, the first differing token,
    and the fields.
    """
    pairs = [(a, b) for a, b in zip(first, made, strict=True) if a != b]
    yield Row(f"{what}: responses that differ", len(pairs))
    places = [_first_difference(a, b) for a, b in pairs]
    if places:
        yield Row(f"{what}: first token that differs, of the first such response", min(places))
        fields = sorted({f.name for f in dataclasses.fields(Generation) for a, b in pairs if _differ(f.name, a, b)})
        yield Row(f"{what}: fields that differ", ", ".join(fields))


def _differ(name: str, a: Generation, b: Generation) -> bool:
    return bool(getattr(a, name) != getattr(b, name))


def _first_difference(a: Generation, b: Generation) -> int:
    same = zip(a.tokens, a.logprobs, b.tokens, b.logprobs, strict=False)
    return next((n for n, (t, p, u, q) in enumerate(same) if (t, p) != (u, q)), min(len(a.tokens), len(b.tokens)))


def run_engine() -> Iterator[Row]:
    """Compare the engine's log-probs with the learner's, and the engine's responses with its responses to the same
    requests again.
    """
    for dtype in ("float32", "bfloat16"):
        yield from guard(f"engine, {dtype}", partial(_engine, f"small policy, {dtype}", dtype, TINY))
    if not GPU:
        yield Row("Qwen2.5-0.5B's shape", NO_GPU)
        return
    for dtype in ("float32", "bfloat16"):
        yield from guard(f"engine, {dtype}", partial(_engine, f"Qwen2.5-0.5B's shape, {dtype}", dtype, QWEN_05B))


def _engine(name: str, dtype: str, sizes: Mapping[str, Any]) -> Iterator[Row]:
    with policy_folder("qwen2", dtype, **sizes) as folder:
        requests = make_requests(48, sizes["vocab_size"], 24, 24)
        alone, together, again = asyncio.run(_three_times(folder, dtype, requests))
        yield check_that(f"{name}: the same bits again", again == together)
        yield check_that(f"{name}: alone the same bits as with 47 beside it", alone == together[: len(alone)])
        learner = build(folder, DEVICE, dtype)
        gaps = torch.cat([_gap(learner, *pair) for pair in zip(requests[:24], together, strict=False)])
        title = f"{name}: engine less learner"
        yield check_at_most(f"{title}, most (the probe's tolerance)", float(gaps.max()), TOLERANCE[dtype], "nats")
        yield check_at_most(f"{title}, mean", float(gaps.mean()), MEAN[dtype], "nats")
        if sizes is TINY:
            exact = build(folder, "cpu", "float64", master_dtype="policy")
            off = torch.cat([_gap(exact, *pair) for pair in zip(requests[:8], together, strict=False)])
            yield Row(f"{name}: engine less float64 on the processor, mean", float(off.mean()), "nats")


async def _three_times(
    folder: Path, dtype: str, requests: Sequence[GenerationRequest]
) -> tuple[list[Generation], list[Generation], list[Generation]]:
    """Generate a few requests one by one, all together, and all together again."""
    engine = await start_engine(folder, dtype, DEVICE)
    try:
        alone = [await engine.generate(request) for request in requests[:3]]
        together = await generate_all(engine, requests)
        return alone, together, await generate_all(engine, requests)
    finally:
        await engine.close()


def _gap(learner: TorchLearner, request: GenerationRequest, made: Generation) -> torch.Tensor:
    """Return the absolute differences between engine and learner of a response's log-probs, (T,) in nats."""
    theirs = learner.logprobs([*request.prompt.tokens, *made.tokens])[request.prompt.length - 1 :]
    return (torch.tensor(list(made.logprobs)) - torch.tensor(theirs)).abs()


def run_turns() -> Iterator[Row]:
    """Alternate engine and learner on one device by moving their tensors to the CPU."""
    sizes = QWEN_05B if GPU else TINY
    with policy_folder("qwen2", "bfloat16", **sizes) as folder:
        requests = make_requests(128 if GPU else 8, sizes["vocab_size"], 48, 96 if GPU else 8)
        batch = make_batch(BatchShape(8, 8, sizes["vocab_size"], (32, 64), 128, 0.5, 400) if GPU else BatchShape())
        with asyncio.Runner() as runner:
            yield from guard("turns", partial(_turns, runner, folder, requests, batch))
    torch.use_deterministic_algorithms(False)


def _turns(runner: asyncio.Runner, folder: Path, requests: Sequence[GenerationRequest], batch: Any) -> Iterator[Row]:
    """Measure the memory of engine and learner alone, side by side, and in turns. The results must be the same."""
    engine_peak, apart_made = runner.run(_alone(folder, requests))
    clear_memory()
    yield from _peak_row("peak of the engine alone", engine_peak)
    learner_peak, apart_weights = _learn_alone(folder, batch)
    clear_memory()
    yield from _peak_row("peak of the learner alone", learner_peak)
    engine = runner.run(start_engine(folder, "bfloat16", DEVICE))
    learner = build(folder, DEVICE, "bfloat16", **KEYS)
    larger = max(engine_peak, learner_peak, 1)
    with Peak() as beside:
        made = _generate(runner, engine, requests)
        learner.step(batch, 0)
    yield check_that("generation beside a learner: the bits of the engine alone", made == apart_made)
    yield from count_differences("beside a learner", apart_made, made)
    yield from _peak_row("peak with both side by side", beside.whole)
    yield from _peak_row("side by side over the larger of the two", beside.whole, larger)
    move_learner(learner, "cpu")
    clear_memory()
    with Peak() as turns:
        made = _generate(runner, engine, requests)
        yield check_that("generation in turns: the bits of the engine alone", made == apart_made)
        yield from count_differences("in turns", apart_made, made)
        yield from _train_between(runner, engine, learner, batch)
        last = _generate(runner, engine, requests[:8])
    yield from _peak_row("peak in turns", turns.whole)
    if GPU:
        yield target_at_most("in turns over the larger of the two", turns.whole / larger, TOGETHER)
    ours = learner.policy.weights()
    apart = sum(int((ours[name].cpu() != apart_weights[name]).sum()) for name in apart_weights)
    yield check_at_most("weights in turns: elements that differ from the learner's alone", apart, 0)
    move_learner(learner, DEVICE)
    gaps = torch.cat([_gap(learner, *pair) for pair in zip(requests[:8], last, strict=True)])
    yield check_at_most("the next version's engine less learner, mean", float(gaps.mean()), MEAN["bfloat16"], "nats")
    runner.run(engine.close())


def _train_between(
    runner: asyncio.Runner, engine: TransformersEngine, learner: TorchLearner, batch: Any
) -> Iterator[Row]:
    """Move the engine to the CPU, train, move the learner to the CPU, and load the next version into the engine."""
    yield _timed("engine to the processor", partial(_free_engine, runner, engine))
    yield _timed("learner to the device", partial(move_learner, learner, DEVICE))
    learner.step(batch, 1)
    yield _timed("learner to the processor", partial(move_learner, learner, "cpu"))
    yield _timed("weights from learner to engine, by files", partial(_hand_over, runner, engine, learner))


def _hand_over(runner: asyncio.Runner, engine: TransformersEngine, learner: TorchLearner) -> None:
    with TemporaryDirectory() as place:
        write_weights(learner, Path(place))
        engine._sampler._model.to(DEVICE)
        runner.run(update_engine(engine, 1, Path(place)))


def _generate(
    runner: asyncio.Runner, engine: TransformersEngine, requests: Sequence[GenerationRequest]
) -> list[Generation]:
    """Generate with torch's deterministic algorithms turned off, because there are none for the engine's sums of
    probabilities.
    """
    torch.use_deterministic_algorithms(False)
    try:
        return runner.run(generate_all(engine, requests))
    finally:
        torch.use_deterministic_algorithms(True)


def _peak_row(what: str, peak: int, over: int = 0) -> Iterator[Row]:
    if not GPU:
        yield Row(what, NO_GPU)
    elif over:
        yield Row(what, peak / over)
    else:
        yield Row(what, peak / GB, "GB")


async def _alone(folder: Path, requests: Sequence[GenerationRequest]) -> tuple[int, list[Generation]]:
    with Peak() as peak:
        engine = await start_engine(folder, "bfloat16", DEVICE)
        made = await generate_all(engine, requests)
        await engine.close()
    del engine
    return peak.added, made


def _learn_alone(folder: Path, batch: Any) -> tuple[int, dict[str, torch.Tensor]]:
    with Peak() as peak:
        learner = build(folder, DEVICE, "bfloat16", **KEYS)
        for version in range(2):
            learner.step(batch, version)
        weights = {name: tensor.cpu() for name, tensor in learner.policy.weights().items()}
    return peak.added, weights


def _timed(what: str, act: Callable[[], None]) -> Row:
    with Peak() as peak:
        act()
    return Row(what, peak.seconds, "s")


def _free_engine(runner: asyncio.Runner, engine: TransformersEngine) -> None:
    """Move the engine's weights to the CPU, and delete its attention state."""
    runner.run(engine.suspend("continue"))
    engine._sampler._groups.clear()
    engine._sampler._model.to("cpu")
    clear_memory()


def move_learner(learner: TorchLearner, device: str) -> None:
    """Move weights, masters and moments to a device. Between two versions a learner has no gradients to move."""
    learner.model.to(device)
    for parameter in learner.policy.trained.parameters.values():
        parameter.data = parameter.data.to(device)
        kept = learner.policy.adamw.state.get(parameter, {})
        kept.update({name: value.to(device) for name, value in kept.items() if isinstance(value, torch.Tensor)})
    clear_memory()


def write_weights(learner: TorchLearner, folder: Path) -> None:
    """Write the policy's weights as the files of a version."""
    for name, data in learner.weights().items():
        with (folder / Path(name).name).open("wb") as file:
            file.writelines(split_buffers(data))
