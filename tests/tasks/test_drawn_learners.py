"""Tests that a learner with any combination of `[train]` keys can continue from the stored state of another one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.token_arrays import Int64s
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import CriticConfig, DeepSpeedTrain, Lora, ReferenceConfig, TorchTrain, TrainConfig
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.config import Correction, PartsObjective, Penalties
from rollflow.tasks.objectives.presets import PRESETS
from rollflow.tasks.objectives.surrogate_config import BinaryTv, Clip, Kimi, PolicyGradient, Ratio
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section
from rollflow.testing.learners import batch, batch_of, saved
from tests.support.counts import examples
from tests.support.tiny_policy import make_policy, make_weights

RANKS = {"ranks", "rank_seconds", "sharded"}  # need several processes: see `test_ranks.py` and `test_fsdp.py`
DRAWN: dict[type[Section], set[str]] = {}  # the drawn keys of each section


def of(section: type[Section], **given: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw some keys of a section: the `given` keys, and all keys with few values (booleans and literals)."""
    few = {n: info.annotation for n, info in section.model_fields.items() if _few(info.annotation) and n not in RANKS}
    keys = {**{name: st.from_type(kinds) for name, kinds in few.items()}, **given}  # type: ignore[arg-type]
    DRAWN[section] = set(keys)
    return st.fixed_dictionaries({}, optional=keys)


def _few(annotation: object) -> bool:
    return annotation is bool or "Literal" in str(annotation)


def between(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


RANGE = st.tuples(between(0, 1), between(1, 3))
SURROGATES = st.one_of(
    of(Clip, low=between(0.01, 1), high=between(0.01, 2), dual=st.none() | between(1.1, 4)).map(
        lambda part: {"kind": "clip", **part}  # a preset may have another kind
    ),
    of(PolicyGradient, positive=RANGE, negative=RANGE).map(lambda part: {**part, "kind": "policy-gradient"}),
    of(BinaryTv, low=between(0.01, 1), high=between(0.01, 1)).map(lambda part: {**part, "kind": "binary-tv"}),
    of(Kimi, tau=between(0.01, 1)).map(lambda part: {**part, "kind": "kimi"}),
)
UNIT = between(0, 1)
OBJECTIVES = of(
    PartsObjective,
    kind=st.sampled_from(sorted(PRESETS)),
    ratio=of(Ratio),
    surrogate=SURROGATES,
    correction=of(Correction, low=between(0, 1), high=between(1, 9), second_moment=between(0.01, 30)),
    penalties=of(
        Penalties,
        kl_weight=st.just(0.0) | between(1e-3, 1),
        kl_target=st.none() | between(1e-4, 1),
        kl_gain=between(0.01, 1),
        entropy_weight=st.just(0.0) | between(1e-3, 0.1),
    ),
    observation_weight=st.just(0.0) | between(1e-3, 1),
    advantage=of(
        Advantage,
        overlong=UNIT,
        gamma=between(0.5, 1),
        gae_lambda=UNIT,
        state_weight=between(0, 2),
        positive_weight=between(0, 2),
        negative_weight=between(0, 2),
    ),
)
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "objective": OBJECTIVES,
    "critic": of(CriticConfig, learning_rate=between(1e-5, 1e-3), value_clip=between(0.01, 1)),
    "reference": of(ReferenceConfig, every=st.integers(0, 2)),
    "lora": st.none()
    | of(Lora, rank=st.integers(1, 4), alpha=between(1, 32), targets=st.just(("q_proj", "down_proj"))),
    "learning_rate": between(1e-5, 1e-3),
    "warmup_versions": st.integers(0, 3),
    "no_signal": st.sampled_from(["report", "stop"]),
    "no_signal_versions": st.integers(1, 5),
    "weight_decay": between(0, 0.1),
    "betas": st.tuples(between(0.1, 0.99), between(0.1, 0.999)),
    "max_grad_norm": between(0.1, 10),
    "minibatches": st.sampled_from([1, 2, 4]),
    "micro_tokens": st.integers(1, 100),
}
OPTIONS = [{}, {"reduce_bucket_size": 5000}, {"overlap_comm": True}, {"sub_group_size": 20000}]
TRAINS = of(TorchTrain, **KEYS)
SHARDED = of(DeepSpeedTrain, **KEYS, options=st.sampled_from([{"zero_optimization": zero} for zero in OPTIONS]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def test_random_learner_configs_cover_every_key() -> None:
    """A key that is added later must be drawn here, too, or this test fails."""
    for section, keys in DRAWN.items():
        assert keys >= section.model_fields.keys() - {"kind", "threads", *RANKS}, section


def valid(tree: dict[str, Any], dtype: str) -> TrainConfig | None:
    """Return the config; None if it is refused, with a sentence that names the key."""
    try:
        policy, turns = {"cold_start": {}, "dtype": dtype}, {"kind": "import", "path": "a:B"}
        return RunConfig.model_validate({"train": tree, "policy": policy, "groups": 4, "environment": turns}).train
    except ValidationError as error:
        if {one["type"] for one in error.errors()} != {"rollflow"}:
            raise
        return None


def play(seed: int) -> TrajectoryBatch:
    """Return a batch of episodes with two turns: one token, and the tokens after a token of the environment."""
    groups = []
    for number, group in enumerate(batch(seed).groups()):
        rows = []
        for one in group.trajectories:
            tokens, first = list(one.tokens), one.loss_mask.index(True)
            mask = [t == first or t > first + 1 for t in range(len(tokens) + 1)]
            tokens.insert(first + 1, 7)
            logprobs, versions = [-0.6 * chosen for chosen in mask], [int(chosen) - 1 for chosen in mask]
            made = replace(one, tokens=tokens, loss_mask=mask, logprobs=logprobs, versions=versions)
            rows.append(replace(made, turn_starts=(first, first + 2), turn_states=Int64s.of([number, seed + 1])))
        groups.append(rows)
    return batch_of(*groups)


def go_on(folder: Path, config: TrainConfig, dtype: str, temperature: float) -> None:
    """Train, store, and continue from the files in another learner. Only one sharded learner may exist at a time."""
    start = LearnerStart(folder, trained=True, dtype=dtype, temperature=temperature, versions=10, longest=6)
    start = replace(start, first=partial(Path, folder))
    made, other = build_learner(config, start), build_learner(config, start)
    for version in range(2):
        metrics = made.step(play(version), version)
        assert all(math.isfinite(value) for value in metrics.values())
    assert made.first_nonfinite() is None
    stored = saved(made)
    expected = made.step(play(2), 2), saved(made)
    torch.rand(3)  # changes the random generator, which the state must restore
    other.load(*stored)
    assert (other.step(play(2), 2), saved(other)) == expected


DTYPES, TEMPERATURES = st.sampled_from(["float32", "bfloat16"]), st.sampled_from([1.0, 0.7])


@pytest.mark.many
@settings(max_examples=examples(200), deadline=None)
@given(tree=TRAINS, dtype=DTYPES, temperature=TEMPERATURES)
def test_learner_of_any_config_continues_from_its_state(
    folder: Path, tree: dict[str, Any], dtype: str, temperature: float
) -> None:
    if config := valid(tree, dtype):
        go_on(folder, config, dtype, temperature)


@pytest.mark.soak
@settings(max_examples=20, deadline=None)
@given(tree=SHARDED, dtype=DTYPES, temperature=TEMPERATURES)
def test_sharded_learner_continues_from_its_state(
    folder: Path, tree: dict[str, Any], dtype: str, temperature: float
) -> None:
    if config := valid({"kind": "deepspeed", **tree}, dtype):
        go_on(folder, config, dtype, temperature)
