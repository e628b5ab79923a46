"""Costs of a plan, compared with examples worked by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.store_config import StoreConfig
from rollflow.tasks.simulation.candidates import Candidate, CandidateOutcome
from rollflow.tasks.simulation.figures import IdleShares
from rollflow.tasks.simulation.hardware import EnginesHardware, Hardware
from rollflow.tasks.simulation.prices import MachinePrice, Prices, StoragePrice, cost_of

PRICES = Prices(
    currency="USD", rollout=MachinePrice(gpus=4, hour=8.0), train=MachinePrice(gpus=8, hour=32.0), rest_hour=4.0
)
DIVIDED = Candidate(6, 8, False, 2.0, 0, 0, False, None)
TURNS = Candidate(8, 8, True, 0.0, 0, 0, False, None)
CONFIG = RunConfig(versions=20)


def outcome(candidate: Candidate, step: float, engines: float, learner: float) -> CandidateOutcome:
    """Return an outcome with this step time in seconds, and these idle shares."""
    figures = SimpleNamespace(
        step_seconds=step, idle=IdleShares(engines=engines, slots=0.0, reward=0.0, learner=learner)
    )
    return CandidateOutcome(candidate, 10, cast(Any, figures), 0.0, 0.0, 0.0)


def test_plan_costs_the_price_of_all_machines_that_it_occupies() -> None:
    """6 engines are 2 machines of 4 GPUs, 16 an hour; 8 GPUs train on one of 32; with the rest 52 an hour.

    A step of 90 s is a fortieth of an hour: 1.30. Of 8 rollout GPUs 6 x 0.75 are busy, 3.5 x 2 an hour are idle; of the
    training GPUs a quarter, 8 an hour: 15 of 52.
    """
    cost = cost_of(outcome(DIVIDED, 90.0, 0.25, 0.25), PRICES, CONFIG, Hardware())
    assert (cost.rollout_machines, cost.train_machines, cost.hour) == (2, 1, 52.0)
    assert (cost.version, cost.run) == (pytest.approx(1.3), pytest.approx(26.0))
    assert cost.idle == pytest.approx(15 / 52)
    assert cost.storage_month is None


def test_gpus_shared_by_both_stages_are_paid_once() -> None:
    """8 GPUs on one machine, 36 an hour with the rest; 50% of them roll out and 20% train, so 30% of 32 is idle."""
    cost = cost_of(outcome(TURNS, 360.0, 0.5, 0.8), PRICES, CONFIG, Hardware())
    assert (cost.rollout_machines, cost.train_machines, cost.hour) == (0, 1, 36.0)
    assert (cost.version, cost.run) == (pytest.approx(3.6), pytest.approx(72.0))
    assert cost.idle == pytest.approx(9.6 / 36)


def test_engine_with_several_gpus_requests_all_its_gpus() -> None:
    """6 engines of 2 GPUs are 3 machines of 4; nothing is idle."""
    hardware = Hardware(engines=EnginesHardware(gpus_per_engine=2.0))
    cost = cost_of(outcome(DIVIDED, 90.0, 0.0, 0.0), PRICES, CONFIG, hardware)
    assert (cost.rollout_machines, cost.hour, cost.idle) == (3, 60.0, 0.0)


def test_storage_cost_counts_only_retained_versions() -> None:
    """The weights of versions 0, 10 and 16 to 20 stay; 9 and 15 stay, too, because 10 and 16 are trained from them.

    The states of versions 0, 9 and 15 to 20 stay.
    """
    prices = PRICES.model_copy(update={"storage": StoragePrice(gb_month=0.5, weights_gb=1.0, state_gb=3.0)})
    config = CONFIG.model_copy(update={"store": StoreConfig(keep_last=5, keep_every=10, state_every=1)})
    cost = cost_of(outcome(DIVIDED, 90.0, 0.0, 0.0), prices, config, Hardware())
    assert cost.storage_month == pytest.approx(0.5 * (9 * 1.0 + 8 * 3.0))


def test_plan_with_machines_of_price_zero_costs_zero() -> None:
    free = MachinePrice(gpus=8, hour=0.0)
    prices = Prices(currency="EUR", rollout=free, train=free)
    cost = cost_of(replace(outcome(DIVIDED, 90.0, 0.5, 0.5)), prices, CONFIG, Hardware())
    assert (cost.hour, cost.run, cost.idle) == (0.0, 0.0, 0.0)
