"""Sets Prometheus gauges of a run's actors through Ray's metrics.

    rollflow_rollout_running{run="sorting-1"} 64
    rollflow_rollout_discards{run="sorting-1", what="stale"} 3

A gauge shows a number from an actor's status (`statuses`) and is named after the status field. Gauges are set once a
second. If a field has several values, the label `what` distinguishes them. The gauges of sandboxes and environments
have labels such as `bubblewrap programs` and `trl hangs`. No gauge is set on a cluster where Ray collects no metrics,
such as a private cluster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import TypeVar

import ray
from ray.util.metrics import Gauge

from rollflow.storage.run_records.sandbox_figures import SandboxUse, SandboxUses, list_figures
from rollflow.tasks.actors.statuses import ActorStatus
from rollflow.tasks.engines.base import DraftCounts
from rollflow.tasks.runtime.cpu import name_own_process
from rollflow.tasks.sandboxes.figures import figures_of_process

SWITCH = "RAY_enable_metrics_collection"  # environment variable of Ray; Ray collects metrics if it is unset
TAGS = ("run", "what")
Status = TypeVar("Status", bound=ActorStatus)
Figure = tuple[str, str, float]  # name of the gauge, its label ("" if the gauge has a single value), value


def read_figures(status: ActorStatus) -> Iterator[Figure]:
    """Yield the numbers in an actor's status; the field `waits_for` counts as 1 if the actor waits, else as 0."""
    for field in fields(status):
        value = getattr(status, field.name)
        if field.name == "costs":
            spent: dict[str, float] = {}
            for cost in value:
                spent[cost.role] = spent.get(cost.role, 0.0) + cost.seconds
            yield from (("cpu_seconds", role, seconds) for role, seconds in spent.items())
        elif field.name == "sandboxes":
            yield from (("sandboxes", what, number) for what, number in _read_sandboxes(value))
        elif field.name == "environments":
            yield from ((field.name, f"{one.kind} {what}", n) for one in value for what, n in one.figures.items())
        elif field.name == "waits_for":
            yield "waits", "", float(bool(value))
        elif isinstance(value, DraftCounts):
            yield from (("drafts", one.name, float(getattr(value, one.name))) for one in fields(value))
        elif isinstance(value, int | float):
            yield field.name, "", float(value)
        elif isinstance(value, Mapping):
            yield from ((field.name, str(what), _to_number(one)) for what, one in value.items())


def _read_sandboxes(uses: Sequence[SandboxUse]) -> Iterator[tuple[str, float]]:
    """Yield the usage numbers of each kind of sandbox, summed over the processes of an actor."""
    found = SandboxUses()
    found.note(uses)
    for kind, figures in found.totals().items():
        yield from ((f"{kind} {name}", number) for name, number in list_figures(figures).items())


def read_own_sandboxes() -> list[SandboxUse]:
    """Return the usage numbers of the sandboxes that this process and its child processes have used."""
    return [SandboxUse(name_own_process(), kind, one) for kind, one in figures_of_process().read().items()]


def _to_number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def collects_metrics() -> bool:
    """Return whether this process is connected to Ray, and Ray collects metrics."""
    return ray.is_initialized() and os.environ.get(SWITCH, "1").lower() not in ("0", "false")


class Gauges:
    """Prometheus gauges of one actor; a gauge without a new value is set to zero."""

    def __init__(self, role: str, uri: str) -> None:
        """Create the gauges of an actor; the id of the run is read from `uri`, the address of its storage."""
        self._role, self._run_id = role, uri.rpartition("/")[2]
        self._made: dict[str, Gauge] = {}
        self._known: set[tuple[str, str]] = set()

    @cached_property
    def on(self) -> bool:
        """True if this process sets Prometheus gauges."""
        return collects_metrics()

    def show(self, status: Status, more: Mapping[str, float] | None = None) -> Status:
        """Set the gauges to the numbers in an actor's status and in `more`; return the status, to which the usage
        numbers of this process's sandboxes are added.
        """
        status = replace(status, sandboxes=[*read_own_sandboxes(), *status.sandboxes])
        if self.on:
            self._set_gauges(status, more or {})
        return status

    def _set_gauges(self, status: ActorStatus, more: Mapping[str, float]) -> None:
        found = [*read_figures(status), *(("metric", name, value) for name, value in more.items())]
        gone = self._known - {(name, what) for name, what, _ in found}
        for name, what, value in [*found, *((name, what, 0.0) for name, what in gone)]:
            self._get_gauge(name).set(value, tags={"run": self._run_id, "what": what})
        self._known = {(name, what) for name, what, _ in found}

    def _get_gauge(self, name: str) -> Gauge:
        if name not in self._made:
            text = f"{name} of the {self._role}: see its status in rollflow"
            self._made[name] = Gauge(f"rollflow_{self._role}_{name}", description=text, tag_keys=TAGS)
        return self._made[name]
