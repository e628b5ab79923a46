"""Creates random models, batches and learners for `make gpu`, and computes the quantities that it compares.

Shapes: T tokens of a row.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.tasks.engines import fixed_shape
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.forward import models
from rollflow.tasks.learners.torch_learner import TorchLearner

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
GB = 1e9
SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.08,  # large enough for tokens to have different probabilities
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 32}
KINDS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", HEAD),
    "gemma2": ("Gemma2Config", {**HEAD, "query_pre_attn_scalar": 32, "sliding_window": 64}),
}
QWEN_05B: Mapping[str, Any] = {  # the shape of Qwen2.5-0.5B
    "vocab_size": 151_936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "initializer_range": 0.02,
}


@contextmanager
def policy_folder(kind: str, dtype: str = "float32", **sizes: Any) -> Iterator[Path]:
    """Write a policy with random weights, drawn from a seed, into a folder that exists during the `with` block."""
    import transformers

    name, own = KINDS[kind]
    config = getattr(transformers, name)(**{**SMALL, **own, **sizes})
    folder = Path(mkdtemp(prefix="rollflow-gpu-"))
    try:
        torch.manual_seed(0)
        large = sizes.get("hidden_size", 0) > 512
        with torch.device(DEVICE if large else "cpu"):  # a CPU needs many seconds to draw half a billion numbers
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
        model.save_pretrained(folder)
        del model
        clear_memory()
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def build(folder: Path, device: str, dtype: str = "float32", **keys: Any) -> TorchLearner:
    """Build rollflow's learner on a device; `keys` are config keys of the section `[train]`."""
    train = TorchTrain.model_validate({"warmup_versions": 0, "learning_rate": 1e-3, **keys})
    start = LearnerStart(folder, trained=True, dtype=dtype, versions=10, longest=64, first=lambda: folder)
    with placed(device):
        learner = build_learner(train, start)
    assert isinstance(learner, TorchLearner)
    return learner


@contextmanager
def placed(device: str) -> Iterator[None]:
    """Let learners and transformers engines that are built during the `with` block use this device."""
    found = torch.device(device)
    with (
        mock.patch.object(models, "find_device", return_value=found),
        mock.patch.object(fixed_shape, "find_device", return_value=found),
    ):
        yield


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The shape of a random batch. Responses have lognormal lengths; all lengths are in tokens."""

    groups: int = 4
    group_size: int = 4
    vocabulary: int = SMALL["vocab_size"]
    prompt: tuple[int, int] = (6, 24)  # shortest and longest prompt, in tokens
    median: float = 20.0
    sigma: float = 0.7
    cap: int = 64


def make_batch(
    shape: BatchShape, logprobs: Callable[[Sequence[int]], Sequence[float]] | None = None
) -> TrajectoryBatch:
    """Create a batch from a seed. The recorded log-probs are those of `logprobs`, or of equally probable tokens, with
    noise.
    """
    draw = np.random.default_rng(0)
    groups = []
    for number in range(shape.groups):
        prompt = draw.integers(2, shape.vocabulary, size=draw.integers(*shape.prompt)).tolist()
        rows = tuple(_trajectory(shape, draw, sample, prompt, logprobs) for sample in range(shape.group_size))
        groups.append(TrajectoryGroup(GroupKey(number, 0), f"prompt-{number}", "made-up", rows))
    return TrajectoryBatch.from_groups(groups)


def _trajectory(shape: BatchShape, draw: Any, sample: int, prompt: list[int], logprobs: Any) -> Trajectory:
    count = int(np.clip(shape.median * np.exp(shape.sigma * draw.normal()), 2, shape.cap))
    tokens = [*prompt, *draw.integers(2, shape.vocabulary, size=count).tolist()]
    own = np.full(count, -np.log(shape.vocabulary)) if logprobs is None else np.array(logprobs(tokens)[-count:])
    own = np.minimum(own + draw.normal(scale=0.15, size=count), 0.0)
    nothing = (0.0,) * len(prompt)
    return Trajectory(
        sample=sample,
        started_version=0,
        tokens=tuple(tokens),
        loss_mask=(False,) * len(prompt) + (True,) * count,
        logprobs=(*nothing, *map(float, own)),
        versions=(-1,) * len(prompt) + (0,) * count,
        reward=float(sample % 2) + 0.25 * float(sample % 3),
        reason="made up",
        ending=StopReason.STOP,
    )


@dataclass(frozen=True, slots=True)
class Stepped:
    """The result of a version's first update, in float64 on the CPU."""

    gradients: dict[str, Tensor]
    change: dict[str, Tensor]  # trained weight -> its change by the whole step


def step_once(learner: TorchLearner, batch: TrajectoryBatch, version: int = 0) -> Stepped:
    """Train one version, and keep the gradient of its first update before it is clipped."""
    policy, found = learner.policy, dict[str, Tensor]()
    clip = policy.clip

    def keep() -> float:
        if not found:
            given = policy.trained.parameters.items()
            found.update({name: to_double(p.grad) for name, p in given if p.grad is not None})
        return clip()

    before = {name: to_double(p) for name, p in policy.trained.parameters.items()}
    with mock.patch.object(policy, "clip", keep):
        learner.step(batch, version)
    change = {name: to_double(p) - before[name] for name, p in policy.trained.parameters.items()}
    return Stepped(found, change)


def to_double(tensor: Tensor) -> Tensor:
    """Return a copy in float64 on the CPU."""
    return tensor.detach().to("cpu", torch.float64, copy=True)


def distance(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Return |found - exact| / |exact| over all tensors together; infinite if a tensor is missing."""
    if found.keys() != exact.keys():
        return float("inf")
    off = sum(float((found[name].double() - exact[name].double()).square().sum()) for name in exact)
    whole = sum(float(exact[name].double().square().sum()) for name in exact)
    return float((off / max(whole, 1e-300)) ** 0.5)


def clear_memory() -> None:
    """Free unused memory, also on the device."""
    gc.collect()
    if GPU:
        torch.cuda.empty_cache()


class Peak:
    """The peak GPU memory during a `with` block: in total, and above the bytes in use at its start."""

    def __enter__(self) -> Peak:
        wait()
        self.began = time.perf_counter()
        self.before = torch.cuda.memory_allocated() if GPU else 0
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        return self

    def __exit__(self, *_: object) -> None:
        wait()
        self.seconds = time.perf_counter() - self.began
        self.whole = torch.cuda.max_memory_allocated() if GPU else 0
        self.added = self.whole - self.before


def wait() -> None:
    """Wait until the GPU has finished its work."""
    if GPU:
        torch.cuda.synchronize()
