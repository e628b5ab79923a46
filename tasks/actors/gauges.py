"""What the run's actors say of themselves, for Prometheus: by Ray's own metrics, which each node's agent serves.

    rollflow_rollout_running{run="sorting-1"} 64
    rollflow_rollout_discards{run="sorting-1", what="stale"} 3

A gauge is a number of a status (`statuses`), of the same name; of a field that holds several, `what` says which. They
are told whenever a status is asked for, once a second. Where Ray collects no metrics, as in a private cluster, nothing
is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from typing import TypeVar

import ray
from ray.util.metrics import Gauge

from rollflow.tasks.actors.statuses import ActorStatus

SWITCH = "RAY_enable_metrics_collection"  # Ray's; without it, it collects
TAGS = ("run", "what")
Status = TypeVar("Status", bound=ActorStatus)
Figure = tuple[str, str, float]  # name, what of it ("": there is one), value


def figures(status: ActorStatus) -> Iterator[Figure]:
    """The numbers of a status. Of texts, as what it waits for, there is 1 or 0."""
    for field in fields(status):
        value = getattr(status, field.name)
        if field.name == "costs":
            spent: dict[str, float] = {}
            for cost in value:
                spent[cost.role] = spent.get(cost.role, 0.0) + cost.seconds
            yield from (("cpu_seconds", role, seconds) for role, seconds in spent.items())
        elif field.name == "waits_for":
            yield "waits", "", float(bool(value))
        elif isinstance(value, int | float):
            yield field.name, "", float(value)
        elif isinstance(value, Mapping):
            yield from ((field.name, str(what), _number(one)) for what, one in value.items())


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 1.0


def collected() -> bool:
    """Whether there is a Ray here, and it collects metrics."""
    return ray.is_initialized() and os.environ.get(SWITCH, "1").lower() not in ("0", "false")


class Gauges:
    """Those of one actor of a run. A value that is not told any more stays at zero."""

    def __init__(self, role: str, uri: str) -> None:
        """`uri` is that of the run's storage, which is not read."""
        self._role, self._run_id = role, uri.rpartition("/")[2]
        self._made: dict[str, Gauge] = {}
        self._told: set[tuple[str, str]] = set()

    @cached_property
    def on(self) -> bool:
        """Whether they are told."""
        return collected()

    def told(self, status: Status, more: Mapping[str, float] | None = None) -> Status:
        """The status, whose numbers are told, and the figures of `more`."""
        if self.on:
            self._tell(status, more or {})
        return status

    def _tell(self, status: ActorStatus, more: Mapping[str, float]) -> None:
        found = [*figures(status), *(("metric", name, value) for name, value in more.items())]
        gone = self._told - {(name, what) for name, what, _ in found}
        for name, what, value in [*found, *((name, what, 0.0) for name, what in gone)]:
            self._gauge(name).set(value, tags={"run": self._run_id, "what": what})
        self._told = {(name, what) for name, what, _ in found}

    def _gauge(self, name: str) -> Gauge:
        if name not in self._made:
            text = f"{name} of the {self._role}: see its status in rollflow"
            self._made[name] = Gauge(f"rollflow_{self._role}_{name}", description=text, tag_keys=TAGS)
        return self._made[name]
