"""Tests which alpha (`async_ratio`) `rollflow check` recommends. The advice uses only the recipe and the machines, and
agrees with the simulator.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.alpha_choice import describe_alphas
from rollflow.flows.keepalive.overlap import BESIDE, Machine, advise_alpha, find_overlap, machines_of
from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.config import EvaluationConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.alphas import choose_alpha, compare_alphas
from rollflow.tasks.simulation.hardware import Hardware

RECIPE = "flows/recipes/sorting.toml"


def recipe(
    alpha: float = 2.0, *, replicas: int = 1, threads: int = 1, ranks: int = 1, train_threads: int = 1
) -> RunConfig:
    own: dict[str, Any] = {"policy": PolicyConfig(path="x"), "evaluation": EvaluationConfig(every=0)}
    engine = {"kind": "vllm", "replicas": replicas, "threads": threads}
    train = {"ranks": ranks, "threads": train_threads}
    return RunConfig(groups=8, group_size=2, async_ratio=alpha, versions=30, engine=engine, train=train, **own)


recipes = st.builds(
    recipe,
    st.sampled_from([0.0, 1.0, 2.0]),
    replicas=st.integers(1, 3),
    threads=st.integers(1, 4),
    ranks=st.integers(1, 2),
    train_threads=st.integers(1, 4),
)
machines = st.lists(
    st.builds(Machine, st.integers(1, 16).map(float), st.integers(0, 4).map(float)), min_size=1, max_size=3
)


@pytest.mark.parametrize(
    ("found", "own"),
    [
        ([Machine(2.0)], False),
        ([Machine(3.0)], True),
        ([Machine(1.0), Machine(2.0)], True),
        ([Machine(2.0, 1.0)], False),
        ([Machine(2.0, 2.0)], True),
        ([Machine(1.0, learner=False), Machine(1.0, engines=False)], True),
    ],
)
def test_overlap_needs_hardware_for_engines_and_learner(found: list[Machine], own: bool) -> None:
    """The engine needs one core or a GPU, the processes beside it need one core, and the learner needs one core or a
    GPU.
    """
    assert find_overlap(recipe(), found).own is own


@given(recipes, machines)
def test_overlap_of_engines_and_learner_grows_with_the_hardware(config: RunConfig, found: list[Machine]) -> None:
    overlap = find_overlap(config, found)
    more = find_overlap(config, [*found, Machine(64.0, 64.0)])
    assert 0 < overlap.shared_speed <= more.shared_speed <= 1
    assert overlap.own == (overlap.shared_speed == 1)
    if not any(machine.gpus for machine in found):
        cores = sum(machine.cores for machine in found)
        need = config.engine.replicas * config.engine.threads + BESIDE + config.train.ranks * config.train.threads
        assert overlap.own == (cores >= need)


@given(recipes, machines)
def test_alpha_advice_states_a_reason_and_a_config_key(config: RunConfig, found: list[Machine]) -> None:
    overlap = find_overlap(config, found)
    note = advise_alpha(config, overlap)
    assert "async_ratio = " in note
    assert note.count("\n") == 0
    assert note.startswith("asynchrony pays here") == overlap.own
    assert f"{overlap.have:.3g} {overlap.of}" in note
    if not overlap.own and config.async_ratio > 0:
        assert "set async_ratio = 0" in note


# without the phase "shrink", which would simulate for minutes
@settings(max_examples=6, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(
    st.integers(1, 8),
    st.integers(1, 2),
    st.integers(1, 2),
    st.floats(1.0, 20.0),
    st.floats(0.5, 1.0),
)
def test_alpha_advice_agrees_with_the_simulator(
    cores: int, replicas: int, train_threads: int, rollout: float, ratio: float
) -> None:
    """If engines and learner share all cores, asynchrony does not shorten a simulated step. If engines and learner have
    cores of their own, asynchrony shortens the step. A train step takes 0.5 to 1 times as long as the rollout."""
    config = recipe(replicas=replicas, train_threads=train_threads)
    overlap = find_overlap(config, [Machine(float(cores))])
    hardware = Hardware.model_validate(
        {
            "engines": {
                "count": replicas,
                "max_concurrent_requests": 16 // replicas,  # one batch fills all slots
                # generation alone is slower if it has fewer cores than it needs
                "seconds_per_token": rollout / 100 * max(1.0, overlap.rollout / cores),
            },
            "responses": {"median": 100, "sigma": 0.0, "cap": 100},
            "learner": {"seconds_per_version": ratio * rollout, "shared_speed": overlap.shared_speed},
        }
    )
    outcomes = compare_alphas(config, hardware, spread=1.0 if overlap.own else overlap.spread)
    chosen = choose_alpha(outcomes)
    if overlap.own:
        assert chosen.async_ratio >= 1
    elif overlap.rollout >= cores:
        assert chosen.async_ratio == 0
    said = list(describe_alphas(config, overlap, outcomes))
    assert f"async_ratio = {chosen.async_ratio:g}" in said[-1]
    assert all("mean staleness" in said[1] for one in outcomes if one.async_ratio)


def test_nodes_of_a_cluster_become_machines_with_their_roles() -> None:
    config = recipe()
    placed = config.model_copy(
        update={
            "cluster": config.cluster.model_validate(
                {"address": "head:6379", "placement": {"engine": {"resource": "rollout"}}}
            )
        }
    )
    nodes = [{"Resources": {"CPU": 8.0, "GPU": 1.0, "rollout": 1.0}, "Labels": {}}, {"Resources": {"CPU": 4.0}}]
    assert machines_of(placed, nodes) == [Machine(8.0, 1.0), Machine(4.0, 0.0, engines=False)]


def test_check_prints_which_alpha_fits_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.flows.commands.check.read_machine", lambda: Machine(2.0))
    assert main(["check", RECIPE, "--offline", "--set", "async_ratio=2"]) == 0
    out = capsys.readouterr().out
    assert "asynchrony overlaps little here: engines and learner share 2 cores" in out
    assert "set async_ratio = 0 and train.threads = 2, or async_ratio = 1" in out
    monkeypatch.setattr("rollflow.flows.commands.check.read_machine", lambda: Machine(8.0))
    assert main(["check", RECIPE, "--offline", "--set", "async_ratio=2"]) == 0
    assert "asynchrony pays here: engines and learner have cores of their own (8 cores" in capsys.readouterr().out
