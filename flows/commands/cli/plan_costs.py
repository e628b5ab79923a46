"""Reads the file of prices for `rollflow plan --cost`, and describes what a planned run would cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from rollflow.flows.config import describe_errors, read_toml
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.candidates import CandidateOutcome
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.planner import Plan
from rollflow.tasks.simulation.prices import Cost, Prices, cost_of


def load_prices(path: Path) -> Prices:
    """Read and check a file of prices of machines and storage.

    Raises:
        ConfigError: the file of prices is invalid; the message names each key that must change.
    """
    tree = read_toml(path, "file of prices")
    try:
        return Prices.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"file of prices {str(path)!r}: {describe_errors(error, Prices, tree)}") from None


def describe_costs(planned: Plan, prices: Prices, config: RunConfig, hardware: Hardware) -> Iterator[str]:
    """Yield sentences about the cost of the recommended plan, of synchronous training, and of the run's storage."""

    def cost(outcome: CandidateOutcome) -> Cost:
        return cost_of(outcome, prices, config, hardware)

    if planned.recommended is not None:
        yield _describe_cost("The recommended plan", cost(planned.recommended), prices.currency, config.versions)
    yield _describe_cost("The synchronous mode", cost(planned.sync), prices.currency, config.versions)
    kept = cost(planned.recommended or planned.sync).storage_month
    if kept is not None:
        yield f"What the run keeps in storage costs {kept:,.4g} {prices.currency} a month."
    yield "Start, cold start and evaluations are not counted. Idle: GPUs on which nothing runs, or that no role uses."


def _describe_cost(who: str, cost: Cost, currency: str, versions: int) -> str:
    counts = ((cost.rollout_machines, "rollout"), (cost.train_machines, "training"))
    machines = " and ".join(f"{count} for {role}" for count, role in counts if count)
    return (
        f"{who} costs {cost.version:,.4g} {currency} a version and {cost.run:,.4g} {currency} for {versions} versions, "
        f"{cost.idle:.0%} of it for idle GPUs ({cost.hour:,.4g} {currency} an hour; machines: {machines})."
    )
