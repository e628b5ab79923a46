"""Logs a training run to MLflow: its configuration, its metrics by policy version, and the reward plot.

The prefix of a metric's name says where the metric comes from: `rollout/` for a batch's trajectories, `train/` for the
train step, `eval/` for held-out prompts, `reward/` for the reward actor, `system/` for time and discarded work, and
`recovery/` for restarts after crashes. Final results are tags (`final.accuracy`, ...).

Logging never delays or ends a training run: a background thread imports MLflow and writes the metrics, and every method
of `Tracker` except `flush` and `finish` returns immediately. A failure of MLflow is added to `warnings`, and the
metrics are written later together with the next ones. No metric is logged twice, because the last logged version is
read from MLflow when the MLflow run is opened. Metrics wait up to `GATHER_SECONDS` for further metrics, because a call
of MLflow costs more than its metrics.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
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

VIEW = "?workflowType=machine_learning"  # With this query, MLflow's UI shows metrics instead of GenAI traces.
ROLLOUT = (
    *("reward", "accuracy", "staleness_", "response_", "surplus_", "discarded_", "groups_", "part_", "alarms"),
    *("skipped_", "turns", "turn_length", "outcome_", "left_out_"),
)
SYSTEM = ("wait_seconds", "step_seconds", "publish_seconds", "tokens_per_second", "idle", "waste")
METRICS_A_CALL = 900  # Largest number of metrics that are logged in one call. MLflow accepts 1,000.
KEPT_POINTS = 10_000
GATHER_SECONDS = 10.0  # Longest time for which the metrics of a policy version wait for those of further versions.
STOP = object()

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True, slots=True)
class Curves:
    """The curves of the reward plot, as pairs of policy version and value: mean training reward, held-out accuracy,
    pass@k, and mean staleness.
    """

    reward: Sequence[tuple[int, float]] = ()
    accuracy: Sequence[tuple[int, float]] = ()
    staleness: Sequence[tuple[int, float]] = ()
    title: str = ""
    pass_at: Mapping[int, Sequence[tuple[int, float]]] = field(default_factory=dict)


class Tracker:
    """Logs one training run to its MLflow run, in a background thread."""

    def __init__(
        self,
        place: TrackingPlace,
        run_id: str,
        parameters: Mapping[str, Any],
        key: str = "",
        missed: Callable[[str, range], Iterable[MetricPoint]] = lambda marker, versions: (),
        beginning: RunFacts | None = None,
    ) -> None:
        """Start the thread that opens the MLflow run.

        `key` distinguishes this run from a run of the same name in another store. `missed` is a function that returns
        the metrics of policy versions that were not logged. `beginning` is the description of the run, which is logged
        once.
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
        # A daemon thread does not keep the process from ending if a tracking server hangs.
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()
        # The first item makes the thread open the MLflow run, so that MLflow is imported while the run starts.
        self._queue.put(lambda: None)

    def log_version(self, version: int, metrics: Mapping[str, float], when: float) -> None:
        """Log the metrics of a committed policy version; `when` is in seconds since the epoch."""
        self._queue.put(version_point(version, metrics, when))

    def log_evaluation(self, version: int, metrics: Mapping[str, float], when: float) -> None:
        """Log the evaluation of a policy version on held-out prompts."""
        self._queue.put(evaluation_point(version, metrics, when))

    def log_recovery(self, number: int, metrics: Mapping[str, float], when: float) -> None:
        """Log the metrics of a recovery from a crash; the run's first recovery has the number 1."""
        self._queue.put(MetricPoint(RECOVERIES, number, {f"recovery/{name}": v for name, v in metrics.items()}, when))

    def log_reward_plot(self, curves: Curves, path: Path) -> None:
        """Draw the reward plot to the file `path`, and log the file to MLflow as an artifact."""
        self._queue.put(lambda: self._log_plot(curves, path))

    def log_anchor(self, anchor: Anchor) -> None:
        """Log the hash of one entry of the run's log."""
        self._queue.put(lambda: self._log_anchor(anchor))

    def log_ending(self, ending: RunOutcome) -> None:
        """Log the result of the run to MLflow, unless MLflow already has it."""
        self._queue.put(lambda: self._log_ending(ending))

    def flush(self, deadline_seconds: float = 10.0) -> bool:
        """Wait until everything that was logged so far is written or has failed. Return False if writing takes longer
        than `deadline_seconds`.
        """
        done = threading.Event()
        self._queue.put(done.set)
        return done.wait(deadline_seconds)

    def finish(self, status: Status, deadline_seconds: float = 20.0) -> bool:
        """Write the remaining metrics, close the MLflow run and end the background thread. Return False if writing
        takes longer than `deadline_seconds`.
        """
        self._queue.put(lambda: self._terminate(status))
        self._queue.put(STOP)
        self._thread.join(deadline_seconds)
        if not self._finished:
            self._warn(f"MLflow at {redact(self.place.uri)} did not finish the run within {deadline_seconds:.0f} s")
        return self._finished

    @property
    def page(self) -> str:
        """The address of the run's page in MLflow, or, for a local database, the command that shows it."""
        if not self.place.uri.startswith("http"):
            return f"mlflow ui --backend-store-uri {redact(self.place.uri)}"
        return self.page_on(redact(self.place.uri))

    def page_on(self, server: str) -> str:
        """Return the address of the run's page on an MLflow server that shows the tracker's database."""
        where = f"/{self._open.experiment_id}/runs/{self._open.run_id}" if self._open else ""
        return f"{server.rstrip('/')}/#/experiments{where}{VIEW}"

    # --- on the thread ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            # Consecutive metrics are collected and written in one call, before the next action.
            for item in self._gather():
                if isinstance(item, MetricPoint):
                    self._pending.append(item)
                    continue
                self._write()
                if item is STOP:
                    self._finished = True
                    return
                item()
            self._write()

    def _gather(self) -> list[Any]:
        """Return the next items of the queue. Metrics wait for further metrics until another item comes."""
        items = [self._queue.get()]
        limit = time.monotonic() + GATHER_SECONDS
        with contextlib.suppress(queue.Empty):
            while isinstance(items[-1], MetricPoint):
                items.append(self._queue.get(timeout=max(0.0, limit - time.monotonic())))
        return items

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
        self._open = None  # The next try opens the MLflow run again, and reads from MLflow which metrics have arrived.
        if len(self._pending) > KEPT_POINTS:
            self._warn(
                f"{len(self._pending) - KEPT_POINTS} points were dropped, because MLflow has not answered for too long"
            )
            del self._pending[:-KEPT_POINTS]

    def _missed_points(self, run: MlflowRun, new: Sequence[MetricPoint]) -> Iterator[MetricPoint]:
        """Yield the metrics of the policy versions between the last one in MLflow and the first of `new`. The missed
        policy versions were published while no supervising process ran.
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
    """Import the modules that a tracker with a local MLflow database needs. Called before a process is forked, so that
    its forks start faster.
    """
    with contextlib.suppress(ImportError):  # The tracker reports the failed import later.
        for module in ("mlflow.tracking.client", "mlflow.store.tracking.sqlalchemy_store"):
            import_module(module)


def _tracking_errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException
    from requests.exceptions import RequestException
    from sqlalchemy.exc import SQLAlchemyError

    return MlflowException, RequestException, SQLAlchemyError, OSError, ImportError, RollflowError


def version_point(version: int, metrics: Mapping[str, float], when: float) -> MetricPoint:
    """Return the metrics of a policy version in the form that is logged to MLflow."""
    return MetricPoint(VERSION, version, {shown_name(name): value for name, value in metrics.items()}, when)


def evaluation_point(version: int, metrics: Mapping[str, float], when: float) -> MetricPoint:
    """Return the metrics of a held-out evaluation in the form that is logged to MLflow."""
    return MetricPoint(EVALUATED, version, {f"eval/{name}": value for name, value in metrics.items()}, when)


def shown_name(metric: str) -> str:
    """Return the name that a metric of a policy version has in MLflow, with its prefix."""
    if metric in SYSTEM:
        return f"system/{metric}"
    if metric.startswith(("reward/", "sandboxes/", "environments/")):
        return metric
    return f"rollout/{metric}" if metric.startswith(ROLLOUT) else f"train/{metric}"


def _split_calls(points: Iterable[MetricPoint]) -> Iterator[list[MetricPoint]]:
    """Split metrics into groups for one MLflow call each. The metrics of one policy version are never split, because a
    call is logged completely or not at all.
    """
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
    """Draw a picture with two plots to the file `path`. The upper plot shows training reward and held-out accuracy, the
    lower plot shows staleness.
    """
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
    lowest = min([0.0, *(reward for _, reward in curves.reward)])  # A format penalty may make a reward negative.
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
