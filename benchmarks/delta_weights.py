"""Measures deltas of weights: how many bytes a policy version takes, and how fast it is published, fetched and loaded.

    steps    real steps of the torch learner (bfloat16 with float32 masters, AdamW), each published as deltas
    engine   the transformers engine loads the elements that changed, or all weights
    store    publish and fetch a version through a store behind a network, whole or as deltas

The policy has the shape of Qwen2.5-0.5B with random weights. The responses are random tokens with random rewards. So
AdamW's steps have their real sizes, but the gradients are not those of a task, and the weights are not pre-trained. How
many weights of bfloat16 change in a step depends on the learning rate, on the sizes of the weights, and on how far the
gradients agree from step to step: random gradients change fewer weights than gradients that agree. In the first steps,
AdamW moves each weight by about the learning rate; later steps are smaller.

Run it as `python -m benchmarks.delta_weights`; 0.5B parameters take 12 GB of memory.
"""

from __future__ import annotations

import hashlib
import statistics
import tempfile
import time
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import Qwen2Config

from benchmarks.data_plane import GROUP_SIZE, commit_next, groups
from benchmarks.distant_store import DistantStore
from benchmarks.publishing_sides import batch
from benchmarks.report import Row, arguments, at_least, at_most, publish
from rollflow.storage.deltas.chain import name_of
from rollflow.storage.deltas.parent import ParentWeights
from rollflow.storage.log.entries import RunCreated, VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.base import Data, ObjectStore
from rollflow.storage.objects.local import LocalStore
from rollflow.storage.policies import PolicyStore, PolicyVersion
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.actors.publishing import Publishing
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import Learner, LearnerStart
from rollflow.tasks.learners.checkpoint.sharded_files import stage_weights
from rollflow.tasks.learners.checkpoint.shards import to_files
from rollflow.tasks.learners.config import TorchTrain

if TYPE_CHECKING:
    from rollflow.tasks.engines.fixed_shape import FixedShapeSampler

KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
SHAPES = {  # config keys and their values by size; `KEYS` names the keys
    "tiny": (1000, 128, 512, 2, 2, 2),
    "30M": (16_000, 512, 2048, 6, 8, 2),
    "0.5B": (151_936, 896, 4864, 24, 14, 2),
}
AIMS: Mapping[float, Mapping[str, float]] = {1e-6: {"mean": 80, "best": 130}, 3e-6: {"mean": 40}}
MOST_APPLY, MOST_STALL = 0.3, 0.05
CHANGED = 0.007  # fraction of the weights that changes in a drawn version


def make_folder(size: str, folder: Path) -> Path:
    """Write a folder with the policy's config."""
    shape = dict(zip(KEYS, SHAPES[size], strict=True))
    Qwen2Config(**shape, tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"]).save_pretrained(folder)
    return folder


class Publisher:
    """A run whose versions are published by a learner in this process. Each trained batch is replaced by a small batch
    in storage.
    """

    def __init__(self, store: ObjectStore, full_every: int) -> None:
        kept = {"keep_last": 10**6, "keep_every": 1, "state_every": 10**6, "full_every": full_every}
        log = Log(store)
        log.create(RunCreated("deltas", {"async_ratio": 10**6, "group_size": GROUP_SIZE, "store": kept}, "", 1))
        log.claim("supervisor")
        self._scheduler, self._writer = log.claim("scheduler"), log.claim("learner")
        self._batches, self._groups = TrajectoryStore(log), groups(GROUP_SIZE)
        self.policies, self.parent = PolicyStore(log), ParentWeights(full_every)

    def publish(self, files: Mapping[str, Data]) -> PolicyVersion:
        """Publish the next version, and return it."""
        number = self.policies.newest() + 1
        entry = commit_next(self._batches, self._scheduler, self._groups).n if number else None
        self.policies.newest()
        stored = stage_weights(self.policies, self._writer, number, files, self.parent)
        state = self.policies.stage(self._writer, number, {} if number else {"learner/state": b"none"})
        body = VersionPublished(number, entry, stored.weights, state, deltas=stored.deltas)
        return self.policies.publish(self._writer, body)


@dataclass
class StepTimes:
    """The seconds of each step, of the step's wait for publishing, and of publishing."""

    steps: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    published: list[float] = field(default_factory=list)


def train_steps(learner: Learner, publisher: Publisher, count: int, tokens: int) -> StepTimes:
    """Take train steps. Publish each version while the next step is computed, as the learner's actor does."""
    publishing, times = Publishing(), StepTimes()

    def store(files: Mapping[str, Data]) -> None:
        began = time.monotonic()
        publisher.publish(files)
        times.published.append(time.monotonic() - began)

    def settle() -> None:
        began = time.monotonic()
        publishing.settle()
        times.waits[-1] += time.monotonic() - began

    publisher.publish(learner.weights())
    for number in range(count):
        began = time.monotonic()
        times.waits.append(0.0)
        learner.step(batch(number, tokens), number, settle)
        times.steps.append(time.monotonic() - began)
        publishing.begin(partial(store, learner.weights()))
    publishing.settle()
    return times


def measure_steps(folder: Path, size: str, rate: float, options: Namespace) -> Iterator[Row]:
    """Train and publish at one learning rate, and compare the bytes of the stored weights with those of whole files."""
    keys = {"learning_rate": rate, "micro_tokens": 512, "warmup_versions": 0}
    start = LearnerStart(folder / "policy", trained=False, dtype="bfloat16", versions=options.steps + 1)
    learner = build_learner(TorchTrain.model_validate(keys), start)
    publisher = Publisher(LocalStore(folder / f"run-{rate:g}"), 10**6)
    times = train_steps(learner, publisher, options.steps, options.tokens)
    versions = list(publisher.policies.since(1))
    stored = [sum(one.size for one in version.stored_weights) for version in versions]
    whole, case = sum(one.size for one in versions[0].weights), f"{size}, learning rate {rate:g}, {options.steps} steps"
    aims = AIMS.get(rate, {})
    yield Row(case, "a whole version, MB", whole / 1e6)
    yield at_least(case, "whole / mean delta", whole / statistics.mean(stored), aims.get("mean", 0))
    yield at_least(case, "mean of whole / delta", statistics.mean(whole / one for one in stored), aims.get("mean", 0))
    yield at_least(case, "best of whole / delta", whole / min(stored), aims.get("best", 0))
    yield Row(case, "worst of whole / delta", whole / max(stored))
    yield Row(case, "first of whole / delta", whole / stored[0])
    yield Row(case, "median of the last 10", whole / statistics.median(stored[-10:]))
    yield Row(case, "a step, seconds", statistics.median(times.steps[1:]))
    yield Row(case, "publishing beside a step, seconds", statistics.median(times.published))
    stall = sum(times.waits[1:]) / sum(times.steps[1:])
    yield at_most(case, "wait of a step for publishing, of a step", stall, MOST_STALL)


def measure_engine(folder: Path, policies: PolicyStore, turns: int) -> Iterator[Row]:
    """Compare loading the changed elements with loading all weights, on the transformers engine."""
    from rollflow.tasks.engines.fixed_shape import FixedShapeSampler

    newest = policies.newest()
    sampler = FixedShapeSampler(folder / "policy", torch.bfloat16, 1, ())
    old, new = (_fetch(policies, number, folder / "cache") for number in (newest - 1, newest))
    whole, changed = list[float](), list[float]()
    for _ in range(turns):
        whole.append(_seconds(partial(sampler.load, new)))
        expected = _digest(sampler)
        sampler.load(old)
        changed.append(_seconds(partial(sampler.load, new, newest - 1, newest)))
        assert _digest(sampler) == expected, "the changed elements give the same bits as a load of all weights"
    case = "transformers engine"
    yield Row(case, "load of all weights, seconds", statistics.median(whole))
    yield Row(case, "load of the changed elements, seconds", statistics.median(changed))
    share = statistics.median(changed) / statistics.median(whole)
    yield at_most(case, "changed elements / all weights", share, MOST_APPLY)


def measure_store(
    folder: Path, policies: PolicyStore, store: Callable[[Path], ObjectStore], case: str
) -> Iterator[Row]:
    """Compare publishing and fetching the newest version through a store, once as whole files and once as deltas."""
    newest, found = policies.newest(), dict[str, tuple[float, float]]()
    versions = [policies.find(number) for number in (newest - 1, newest)]
    files = [{name_of(one): policies.read(one) for one in version.weights} for version in versions]
    for way, full_every in (("whole", 1), ("delta", 10**6)):
        remote, cache = store(folder / uuid.uuid4().hex), folder / uuid.uuid4().hex
        publisher = Publisher(remote, full_every)
        publisher.publish(files[0])
        there = partial(publisher.policies.weights_folder, cache=cache)
        there(publisher.policies.find(0))
        published = _seconds(partial(publisher.publish, files[1]))
        found[way] = published, _seconds(partial(there, publisher.policies.find(1)))
    where = f"store at 30 ms and 1 Gbit/s, {case}"
    for place, what in enumerate(("publish", "fetch to a node")):
        yield Row(where, f"{what} whole, seconds", found["whole"][place])
        yield Row(where, f"{what} as deltas, seconds", found["delta"][place])
        yield Row(where, f"{what}, whole / deltas", found["whole"][place] / found["delta"][place])


def measure_drawn(folder: Path, count: int, share: float = CHANGED) -> Iterator[Row]:
    """Compare publishing and fetching `count` bfloat16 weights; a share of them changes by the smallest step."""
    draw = torch.Generator().manual_seed(0)
    before = (torch.randn(count, generator=draw) * 0.02).bfloat16()
    steps = (torch.rand(count, generator=draw) < share) * (2 * torch.randint(2, (count,), generator=draw) - 1)
    after = (before.view(torch.int16) + steps.to(torch.int16)).view(torch.bfloat16)
    publisher = Publisher(LocalStore(folder / uuid.uuid4().hex), 10**6)
    for weights in (before, after):
        publisher.publish(to_files("weights/model", {f"{n}": part for n, part in enumerate(weights.tensor_split(50))}))
    case = f"{count / 1e6:g}M parameters in bfloat16, {share:.1%} change"
    yield from measure_store(folder, publisher.policies, DistantStore, case)


def _fetch(policies: PolicyStore, number: int, cache: Path) -> Path:
    return policies.weights_folder(policies.find(number), cache)


def _digest(sampler: FixedShapeSampler) -> str:
    found = hashlib.sha256()
    for parameter in sampler._model.parameters():
        found.update(parameter.detach().view(torch.int16).numpy().data)
    return found.hexdigest()


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=16, help="length of each of 16 responses")
    parser.add_argument("--rates", type=float, nargs="*", default=list(AIMS))
    parser.add_argument("--turns", type=int, default=5, help="loads of the engine, for the median")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--folder", type=Path, help="folder to write to; default: a temporary folder")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        make_folder(options.size, folder / "policy")
        rows = [row for rate in options.rates for row in measure_steps(folder, options.size, rate, options)]
        policies = PolicyStore(Log(LocalStore(folder / f"run-{options.rates[0]:g}")))
        rows += measure_engine(folder, policies, options.turns)
        rows += measure_store(folder, policies, DistantStore, f"{options.size}, newest step")
    publish(rows, "deltas of weights", options.json)


if __name__ == "__main__":
    main()
