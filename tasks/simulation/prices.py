"""Computes the cost of a training run: the price of machines per hour, and the price of the stored objects.

    hour       machines x price, of rollout, of training, and of the rest
    version    hour x seconds of a step / 3600
    run        version x versions, without start, cold start and evaluations
    idle       share of the price for GPUs on which nothing runs, including GPUs that no role uses

Whole machines are paid: 9 GPUs on machines with 8 GPUs cost as much as two machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field

from rollflow.storage.log.retention import Kind, Retention
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.sections import Section
from rollflow.tasks.simulation.candidates import CandidateOutcome
from rollflow.tasks.simulation.hardware import Hardware


class MachinePrice(Section):
    """The price and size of one kind of machine, on which all engines or all training processes run."""

    gpus: int = Field(gt=0, description="number of GPUs of one machine")
    hour: float = Field(ge=0, description="price of one machine per hour")


class StoragePrice(Section):
    """The price of the object store, and the sizes of the objects that one policy version writes to the store."""

    gb_month: float = Field(ge=0, description="price of one GB of storage per month")
    weights_gb: float = Field(ge=0, description="size of the stored weights of one policy version, in GB")
    state_gb: float = Field(
        0.0, ge=0, description="size of the stored learner's state (optimizer moments) of one policy version, in GB"
    )


class Prices(Section):
    """The content of a price file; all prices are in one currency."""

    keys_page: ClassVar[str] = "docs/planning.md"

    currency: str = Field(min_length=1, description='currency that is printed after each amount, e.g. "USD"')
    rollout: MachinePrice = Field(description="machines on which the inference engines run")
    train: MachinePrice = Field(
        description="machines on which the learner trains; if engines and learner take turns on the same GPUs, all "
        "machines"
    )
    rest_hour: float = Field(
        0.0, ge=0, description="price per hour of everything without a GPU: Ray head, servers and database"
    )
    storage: StoragePrice | None = Field(
        None, description="price of the object store; by default the cost of storage is not counted"
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a simulated run, in the currency of the prices."""

    rollout_machines: int
    train_machines: int
    hour: float
    version: float
    run: float
    idle: float  # share of `hour` for idle GPUs
    storage_month: float | None  # monthly price of the objects that the run leaves in storage


def cost_of(outcome: CandidateOutcome, prices: Prices, config: RunConfig, hardware: Hardware) -> Cost:
    """Compute the cost of a simulated run; `config` says how many policy versions are trained and kept."""
    candidate, idle = outcome.candidate, outcome.figures.idle
    engine_gpus = candidate.engines * hardware.engines.gpus_per_engine
    generating, training = engine_gpus * _busy(idle.engines), candidate.learner_gpus * _busy(idle.learner)
    if candidate.colocated:
        groups = [_Machines.for_gpus(0, prices.rollout), _Machines.for_gpus(candidate.learner_gpus, prices.train)]
        busy = [0.0, generating + training]
    else:
        groups = [
            _Machines.for_gpus(engine_gpus, prices.rollout),
            _Machines.for_gpus(candidate.learner_gpus, prices.train),
        ]
        busy = [generating, training]
    hour = sum(group.hour for group in groups) + prices.rest_hour
    waits = sum(group.idle_hour(gpus) for group, gpus in zip(groups, busy, strict=True))
    version = hour * outcome.figures.step_seconds / 3600.0
    return Cost(
        rollout_machines=groups[0].count,
        train_machines=groups[1].count,
        hour=hour,
        version=version,
        run=version * config.versions,
        idle=waits / hour if hour else 0.0,
        storage_month=None if prices.storage is None else _storage_month(prices.storage, config, candidate.async_ratio),
    )


@dataclass(frozen=True, slots=True)
class _Machines:
    """A number of machines of one kind, with their price."""

    count: int
    price: MachinePrice

    @classmethod
    def for_gpus(cls, gpus: float, price: MachinePrice) -> _Machines:
        """Compute how many machines are needed for `gpus` GPUs."""
        return cls(math.ceil(round(gpus / price.gpus, 9)), price)

    @property
    def hour(self) -> float:
        """Price of these machines per hour."""
        return self.count * self.price.hour

    def idle_hour(self, busy_gpus: float) -> float:
        """Return the price per hour of the GPUs that a run leaves idle."""
        return max(0.0, self.count * self.price.gpus - busy_gpus) * self.price.hour / self.price.gpus


def _busy(idle: float) -> float:
    return 1.0 - max(0.0, idle)


def _storage_month(price: StoragePrice, config: RunConfig, alpha: float) -> float:
    """Return the monthly price of the objects that a run leaves in storage; engines may need the newest `alpha` + 1
    policy versions.
    """
    store, last = config.store, config.versions
    # the size of a delta is unknown, so all kept weights count as whole
    retention = Retention(max(store.keep_last, int(alpha) + 1), store.keep_every, store.state_every, store.full_every)
    sizes: dict[Kind, float] = {"weights": price.weights_gb, "state": price.state_gb}
    versions = {kind: sum(retention.is_needed(kind, version, last) for version in range(last + 1)) for kind in sizes}
    return price.gb_month * sum(size * versions[kind] for kind, size in sizes.items())
