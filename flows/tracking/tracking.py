"""Logs a run to MLflow: parameters, metrics by policy version, the reward plot.

A metric's prefix names its subject: `rollout/` is computed from a batch's trajectories, `train/` from the train step,
`eval/` from held-out prompts alone. `system/` has time and waste, `recovery/` has restarts (by number, not by version).
The results of the run are in its tags (`final.accuracy`, ...).

MLflow is only a view, so tracking never delays or ends a run:
- every method returns at once; one thread imports MLflow (which takes seconds), opens the store (which takes seconds if
  the store is new) and writes many versions in one call;
- a failure of MLflow, its database or its server is recorded in `warnings` and counted in `failures`. The unwritten
  data is kept and written with the next write. Only `flush` and `finish` wait, within a deadline.

No point is logged twice. When the run is opened (or opened again after a failure), the last logged version is read back
from MLflow: versions up to the last logged one are skipped, and `missed` gives later versions that nobody has logged.
Callers log a version after it is committed.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from rollflow.flows.services.reachability import redact
from rollflow.flows.tracking.mlflow_payload import RunFacts, RunOutcome
from rollflow.flows.tracking.mlflow_run import (
    EVALUATED,
    KEY_TAG,
    RECOVERIES,
    RUN_TAG,
    VERSION,
    MetricPoint,
    MlflowRun,
    TrackingPlace,
    open_run,
)
from rollflow.flows.views.parameters import flatten
from rollflow.storage.audit.anchors import Anchor
from rollflow.storage.errors import RollflowError

VIEW = "?workflowType=machine_learning"  # otherwise MLflow's pages show GenAI traces, and a run has no such traces
ROLLOUT = ("reward", "accuracy", "staleness_", "response_", "surplus_", "discarded_", "groups_")
SYSTEM = ("wait_seconds", "step_seconds", "publish_seconds", "tokens_per_second", "idle", "waste")
METRICS_A_CALL = 900  # largest number of metrics in one call; MLflow accepts 1,000
KEPT_POINTS = 10_000
STOP = object()

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of the reward plot, by version: mean training reward, held-out accuracy (and
    pass@k), mean staleness.
    """

    reward: Sequence[tuple[int, float]] = ()
    accuracy: Sequence[tuple[int, float]] = ()
    staleness: Sequence[tuple[int, float]] = ()
    title: str = ""
    pass_at: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)


class Tracker:
    """The MLflow run of one rollflow run."""

    def __init__(
        self,
        place: TrackingPlace,
        run_id: str,
        parameters: Mapping[str, Any],
        key: str = "",
        missed: Callable[[str, range], Iterable[MetricPoint]] = lambda marker, versions: (),
        beginning: RunFacts | None = None,
    ) -> None:
        """Open the MLflow run in the background.

        Args:
            key: distinguishes this run from a run of the same name in another store.
            missed: returns the points that nobody has logged.
            beginning: the facts that are logged once, at the start.
        """
        self.place = place
        self.tags = {RUN_TAG: run_id, KEY_TAG: key or run_id}
        self.failures = 0
        self.warnings: list[str] = []
        self._parameters, self._missed, self._beginning = flatten(parameters), missed, beginning or RunFacts()
        self._open: MlflowRun | None = None
        self._pending: list[MetricPoint] = []
        self._finished = False
        self._queue: queue.Queue[Any] = queue.Queue()
        # The thread is a daemon, so that a tracking server that hangs does not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()
        # opens the MLflow run at once, so that the import of MLflow overlaps the start of the training run
        self._queue.put(lambda: None)

    def log_version(self, version: int, metrics: Mapping[str, float], when: float) -> None:
        """Log the metrics of a committed version (`when`: seconds since the epoch)."""
        self._queue.put(version_point(version, metrics, when))

    def log_evaluation(self, version: int, metrics: Mapping[str, float], when: float) -> None:
        """Log a version's evaluation on held-out prompts."""
        self._queue.put(evaluation_point(version, metrics, when))

    def log_recovery(self, number: int, metrics: Mapping[str, float], when: float) -> None:
        """Log a recovery, the `number`-th of the run (from 1)."""
        self._queue.put(MetricPoint(RECOVERIES, number, {f"recovery/{name}": v for name, v in metrics.items()}, when))

    def log_reward_plot(self, curves: Curves, path: Path) -> None:
        """Draw the curves to `path` (PNG) and log it as the artifact `reward.png`."""
        self._queue.put(lambda: self._log_plot(curves, path))

    def log_anchor(self, anchor: Anchor) -> None:
        """Log the hash of one of the run's entries."""
        self._queue.put(lambda: self._log_anchor(anchor))

    def log_ending(self, ending: RunOutcome) -> None:
        """Log the result of the run, unless it is already logged."""
        self._queue.put(lambda: self._log_ending(ending))

    def flush(self, deadline_seconds: float = 10.0) -> bool:
        """Wait until everything that was handed over is written or has failed; return False if the deadline came
        first.
        """
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(deadline_seconds)

    def finish(self, status: Status, deadline_seconds: float = 20.0) -> bool:
        """Write the remaining data, close the MLflow run and end the thread; return False if the deadline came
        first.
        """
        self._queue.put(lambda: self._terminate(status))
        self._queue.put(STOP)
        self._thread.join(deadline_seconds)
        if not self._finished:
            self._warn(f"MLflow at {redact(self.place.uri)} did not finish the run within {deadline_seconds:.0f} s")
        return self._finished

    @property
    def page(self) -> str:
        """The page of the run: an address, or the command that shows a local store."""
        if not self.place.uri.startswith("http"):
            return f"mlflow ui --backend-store-uri {redact(self.place.uri)}"
        return self.page_on(redact(self.place.uri))

    def page_on(self, server: str) -> str:
        """Return the run's address on an MLflow server that shows this store."""
        where = f"/{self._open.experiment_id}/runs/{self._open.run_id}" if self._open else ""
        return f"{server.rstrip('/')}/#/experiments{where}{VIEW}"

    # --- on the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            items = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    items.append(self._queue.get_nowait())
            # points that follow each other are collected, and written in one call before the next action
            for item in items:
                if isinstance(item, MetricPoint):
                    self._pending.append(item)
                    continue
                self._write()
                if item is STOP:
                    self._finished = True
                    return
                item()
            self._write()

    def _write(self) -> None:
        with self._record_failures("writing"):
            run = self._open_or_get()
            new = [p for p in self._pending if p.version > run.last.get(p.marker, -1)]
            for points in _split_calls(chain(self._missed_points(run, new), new)):
                run.log_points(points)
                for point in points:
                    run.last[point.marker] = max(point.version, run.last.get(point.marker, -1))
            self._pending.clear()
            return
        self._open = None  # reopening the run before the next try reads back which points arrived
        if len(self._pending) > KEPT_POINTS:
            self._warn(
                f"{len(self._pending) - KEPT_POINTS} points were dropped, because MLflow has not answered for too long"
            )
            del self._pending[:-KEPT_POINTS]

    def _missed_points(self, run: MlflowRun, new: Sequence[MetricPoint]) -> Iterator[MetricPoint]:
        """Yield the points between the last point in MLflow and the first of `new`, which belong to a time without a
        supervisor.
        """
        for marker in (VERSION, EVALUATED):
            first = min((point.version for point in new if point.marker == marker), default=0)
            if versions := range(run.last.get(marker, 0) + 1, first):
                yield from self._missed(marker, versions)

    def _open_or_get(self) -> MlflowRun:
        if self._open is None:
            self._open = open_run(self.place, self.tags, self._parameters, self._beginning)
        return self._open

    def _log_plot(self, curves: Curves, path: Path) -> None:
        with self._record_failures("the reward plot"):
            draw_curves(curves, path)
            run = self._open_or_get()
            run.client.log_artifact(run.run_id, str(path))

    def _log_anchor(self, anchor: Anchor) -> None:
        with self._record_failures("an anchor"):
            self._open_or_get().log_anchor(anchor)

    def _log_ending(self, ending: RunOutcome) -> None:
        with self._record_failures("the result of the run"):
            self._open_or_get().log_ending(ending)

    def _terminate(self, status: Status) -> None:
        with self._record_failures("closing the run"):
            run = self._open_or_get()
            run.client.set_terminated(run.run_id, status)

    @contextlib.contextmanager
    def _record_failures(self, what: str) -> Iterator[None]:
        try:
            errors = _tracking_errors()
        except ImportError as error:
            errors = (ImportError,)
            self._warn(f"tracking, {what}: MLflow cannot be imported ({error})")
        try:
            yield
        except errors as error:
            self._warn(
                f"tracking, {what}: {type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
            )

    def _warn(self, text: str) -> None:
        self.failures += 1
        if text not in self.warnings[-5:]:
            self.warnings.append(text)


def import_early() -> None:
    """Import what a tracker with a local store needs, before this process is forked."""
    with contextlib.suppress(ImportError):  # the tracker itself reports a failure
        for module in ("mlflow.tracking.client", "mlflow.store.tracking.sqlalchemy_store"):
            import_module(module)


def _tracking_errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, RequestException, SQLAlchemyError, OSError, ImportError, RollflowError


def version_point(version: int, metrics: Mapping[str, float], when: float) -> MetricPoint:
    """Return the point that MLflow gets of a version."""
    return MetricPoint(VERSION, version, {shown_name(name): value for name, value in metrics.items()}, when)


def evaluation_point(version: int, metrics: Mapping[str, float], when: float) -> MetricPoint:
    """Return the point that MLflow gets of an evaluation."""
    return MetricPoint(EVALUATED, version, {f"eval/{name}": value for name, value in metrics.items()}, when)


def shown_name(metric: str) -> str:
    """Return the name that a version's metric has in MLflow."""
    if metric in SYSTEM:
        return f"system/{metric}"
    return f"rollout/{metric}" if metric.startswith(ROLLOUT) else f"train/{metric}"


def _split_calls(points: Iterable[MetricPoint]) -> Iterator[list[MetricPoint]]:
    """Split points into calls at version boundaries: a call is all or nothing, so no version is logged in part."""
    chunk: list[MetricPoint] = []
    size = 0
    for point in points:
        if chunk and size + len(point.metrics) + 1 > METRICS_A_CALL:
            yield chunk
            chunk, size = [], 0
        chunk.append(point)
        size += len(point.metrics) + 1
    if chunk:
        yield chunk


def draw_curves(curves: Curves, path: Path) -> None:
    """Draw reward and held-out accuracy above, staleness below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    if curves.reward:
        upper.plot(*zip(*curves.reward, strict=True), color="#9db8d2", linewidth=1, label="training reward (mean)")
        upper.plot(*zip(*_smooth(curves.reward), strict=True), color="#1f5a96", linewidth=2, label="smoothed")
    if curves.accuracy:
        upper.plot(*zip(*curves.accuracy, strict=True), "o-", color="#d1622b", label="held-out accuracy")
    for k, points in curves.pass_at.items():
        upper.plot(*zip(*points, strict=True), "--", color="#d1622b", linewidth=1, label=f"held-out pass@{k}")
    lowest = min([0.0, *(reward for _, reward in curves.reward)])  # a reward is below 0 if a format penalty applies
    upper.set(ylabel="reward, accuracy", ylim=(lowest, 1.02), title=curves.title)
    if curves.reward or curves.accuracy:
        upper.legend(loc="lower right", frameon=False)
    if curves.staleness:
        lower.step(*zip(*curves.staleness, strict=True), color="#5f7f5f", where="mid")
    lower.set(xlabel="policy version", ylabel="staleness\n(mean)")
    lower.set_ylim(bottom=0)
    for axes in (upper, lower):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")


def _smooth(points: Sequence[tuple[int, float]], window: int = 9) -> list[tuple[int, float]]:
    half = window // 2
    values = [value for _, value in points]
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [(version, sum(w) / len(w)) for (version, _), w in zip(points, windows, strict=True)]
