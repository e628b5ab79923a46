"""Shows a run on the console: a live view on a terminal, plain lines on any other output, and the closing summary on
both. A view draws only the status that is passed to `show(status)`, and raises no error for an unusual value.
`PlainView` writes at most one line every `every_seconds`, but a new phase, accuracy or message immediately.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rollflow.flows.views.status import RunStatus, StageStatus

BLOCKS = "▁▂▃▄▅▆▇█"
STALENESS_STYLES = ("green", "cyan", "yellow", "magenta", "red")
PHASE_STYLES = {"done": "bold green", "failed": "bold red", "training": "bold cyan"}
WORTH_SAYING = 0.02  # The summary does not list a role whose share of the CPU seconds is smaller.
# Roles whose processes only watch the run and do no training.
WATCHING = {"command", "supervisor", "stage flows", "runner", "prefect server"}
STATE_MARKS = {
    "running": ("●", "green"),
    "waiting": ("◌", "yellow"),
    "idle": ("◌", "yellow"),
    "completed": ("✓", "green"),
}
BAD_STATES = {"failed", "crashed", "lost", "stalled", "cancelled"}


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """Draw `values` as one line of block characters, scaled to the range of the values. If there are more values than
    `width`, neighbouring values are averaged.
    """
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(len(BLOCKS) - 1, int((value - low) / span * len(BLOCKS)))] for value in means)


def format_duration(seconds: float) -> str:
    """Format a duration in seconds as text, such as 48 s, 3:07 or 1:02:09."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def staleness_bar(counts: Mapping[int, int], width: int) -> Text:
    """Return a bar that shows the shares of trained trajectories by staleness, with a legend."""
    total = sum(counts.values())
    if total == 0:
        return Text("nothing trained yet", style="dim")
    bar, legend = Text(), Text()
    for staleness in sorted(counts):
        style = STALENESS_STYLES[min(staleness, len(STALENESS_STYLES) - 1)]
        share = counts[staleness] / total
        cells = round(share * width)
        bar.append("█" * (max(1, cells) if counts[staleness] else 0), style=style)
        legend.append(f"  {staleness}", style=f"bold {style}").append(f" {share:.0%}", style="dim")
    return bar + legend


def _gauge(filled: int, capacity: int, width: int) -> Text:
    cells = min(width, round(width * filled / capacity)) if capacity else 0
    return Text("█" * cells, style="cyan") + Text("░" * (width - cells), style="bright_black")


class LiveView:
    """Shows a run's status as a panel on the terminal, which is redrawn in place."""

    def __init__(self, stream: TextIO | None = None, *, console: Console | None = None) -> None:
        self._console = console or Console(file=stream)
        self._status: RunStatus | None = None
        self._live = Live(console=self._console, refresh_per_second=4, transient=False, get_renderable=self._render)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, status: RunStatus) -> None:
        """Draw this status from now on."""
        self._status = status

    def _render(self) -> RenderableType:
        return Text("starting ...", style="dim") if self._status is None else render(self._status, self._console.width)


def render(status: RunStatus, width: int = 80) -> RenderableType:
    """Return the live view's panel."""
    inner = max(24, min(width, 100) - 20)
    parts: list[RenderableType] = [_figure_table(status, inner), Text(), _stage_table(status.stages)]
    parts += [
        Text(f"  {message}", style="yellow", overflow="ellipsis", no_wrap=True) for message in status.messages[-3:]
    ]
    parts += [Text(f"  {alarm}", style="yellow") for alarm in status.alarms]
    title = Text.assemble((" rollflow ", "bold"), (status.run_id, "cyan"), " ")
    foot = Text.assemble(
        " ", (status.phase, PHASE_STYLES.get(status.phase, "bold yellow")), f"  {format_duration(status.seconds)} "
    )
    return Panel(
        Group(*parts), title=title, title_align="left", subtitle=foot, subtitle_align="right",
        width=min(width, 100), border_style="bright_black", padding=(0, 1),
    )  # fmt: skip


def _figure_table(status: RunStatus, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    progress = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, status.versions), completed=status.version, width=width - 16, complete_style="cyan")
    progress.add_row(bar, Text(f"{status.version}", style="bold") + Text(f" / {status.versions}", style="dim"))
    table.add_row("version", progress)
    table.add_row("reward", _reward(status, width))
    table.add_row("held-out", _accuracy(status.accuracy))
    if status.pass_at:
        table.add_row("pass@k", _pass_at(status.pass_at))
    table.add_row("staleness", staleness_bar(status.staleness, width - 24))
    if len(status.domains) > 1:
        table.add_row("domains", _domains(status))
    if status.skipped:
        table.add_row("skipped", Text(_format_skipped(status.skipped)))
    speed = Text(f"{status.tokens_per_second:,.0f}", style="bold") + Text(
        f" tokens/s   {status.tokens_per_second_total:,.0f} over the run", style="dim"
    )
    table.add_row("speed", speed)
    buffer = _gauge(status.buffer_groups, status.buffer_capacity, 12)
    buffer.append(f" {status.buffer_groups}", style="bold").append(f" of {status.buffer_capacity} groups", style="dim")
    table.add_row("buffer", buffer.append(f"   {status.in_flight_groups} in flight", style="dim"))
    return table


def _format_skipped(shares: Mapping[str, float]) -> str:
    """Format the share of solved questions that each prompt domain skips in its newest epoch."""
    return "   ".join(f"{share:.0%} of the questions of {domain} are solved" for domain, share in shares.items())


def _format_domain(name: str, figures: Mapping[str, float]) -> str:
    accuracy = f", accuracy {figures['accuracy']:.3f}" if "accuracy" in figures else ""
    return f"{name} {figures['share']:.1%} (asked {figures['asked']:.1%}){accuracy}"


def _reward(status: RunStatus, width: int) -> Text:
    if status.reward is None:
        return Text("-", style="dim")
    return Text(f"{status.reward:.3f} ", style="bold") + Text(draw_sparkline(status.rewards, width - 8), style="green")


def _accuracy(points: Sequence[tuple[int, float]]) -> Text:
    if not points:
        return Text("-", style="dim")
    shown = [points[0], *points[1:][-4:]]
    text = Text()
    for position, (version, accuracy) in enumerate(shown):
        if position:
            text.append(" ⋯ " if position == 1 and len(points) > len(shown) else " → ", style="dim")
        text.append(f"{accuracy:.1%}", style="bold").append(f" v{version}", style="dim")
    return text


def _pass_at(shares: Mapping[int, float]) -> Text:
    """Format the pass@k of the newest evaluated policy version as text."""
    text = Text()
    for k, share in shares.items():
        text.append("  " if text else "").append(f"@{k} ", style="dim").append(f"{share:.1%}", style="bold")
    return text


def _domains(status: RunStatus) -> Text:
    """Format each prompt domain's share of the trained groups of responses, with its configured share."""
    total, text = max(sum(status.domains.values()), 1), Text()
    for domain, groups in status.domains.items():
        text.append("  " if text else "").append(f"{domain} ").append(f"{groups / total:.0%}", style="bold")
        text.append(f" of {status.shares.get(domain, 0.0):.0%}", style="dim")
    return text


def _stage_table(stages: Mapping[str, StageStatus]) -> Table:
    table = Table.grid(padding=(0, 2), expand=True)
    for style in ("bold", "", "dim"):
        table.add_column(style=style, no_wrap=True)
    table.add_column(style="dim", ratio=1, no_wrap=True, overflow="ellipsis")
    for name, stage in stages.items():
        said = stage.state.lower()  # Prefect writes the names of states with a capital letter
        mark, style = ("✗", "red") if said in BAD_STATES else STATE_MARKS.get(said, ("●", "cyan"))
        state = Text.assemble((f"{mark} ", style), said)
        table.add_row(name, state, f"idle {stage.idle:4.0%}", stage.note)
    return table


class PlainView:
    """Shows a run's status as plain lines of text, one line for each change."""

    def __init__(
        self, stream: TextIO, *, every_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._stream = stream
        self._every = every_seconds
        self._clock = clock
        self._last: RunStatus | None = None
        self._last_at = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.flush()

    def show(self, status: RunStatus) -> None:
        """Write a line of text if the run's status has changed since the last call."""
        last = self._last
        fresh = list(status.messages) if last is None else _find_new(last.messages, status.messages)
        news = last is None or (last.phase, last.accuracy) != (status.phase, status.accuracy)
        moved = last is not None and plain_line(last)[1:] != plain_line(status)[1:]
        for message in fresh:
            print(f"[{format_duration(status.seconds)}] {message}", file=self._stream, flush=True)
        if news or (moved and self._clock() - self._last_at >= self._every):
            stamp, *rest = plain_line(status)
            print(stamp, " | ".join(rest), file=self._stream, flush=True)
            self._last_at = self._clock()
            self._last = status
        elif fresh:
            self._last = status


def _find_new(before: Sequence[str], now: Sequence[str]) -> list[str]:
    """Return the new messages at the end of `now`, which are those that are not in `before`. `before` and `now` may
    contain only the last messages of longer lists of messages.
    """
    for overlap in range(min(len(before), len(now)), -1, -1):
        if list(before[len(before) - overlap :]) == list(now[:overlap]):
            return list(now[overlap:])
    return list(now)


def plain_line(status: RunStatus) -> list[str]:
    """Return the parts of a plain line about a run's status: the time, then the values that are known."""
    parts = [f"[{format_duration(status.seconds)}]", status.phase]
    if status.versions:
        parts.append(f"version {status.version}/{status.versions}")
    if status.reward is not None:
        parts.append(f"reward {status.reward:.3f}")
    if status.accuracy:
        parts.append(f"held-out {status.accuracy[-1][1]:.1%}")
    parts += [f"pass@{k} {share:.1%}" for k, share in status.pass_at.items()]
    if status.staleness:
        parts.append("staleness " + " ".join(f"{key}:{count}" for key, count in sorted(status.staleness.items())))
    if status.tokens_per_second:
        parts.append(f"{status.tokens_per_second:,.0f} tok/s")
    if status.buffer_capacity:
        parts.append(f"buffer {status.buffer_groups}/{status.buffer_capacity}")
    busy = [
        f"{name} {stage.state.lower()}" for name, stage in status.stages.items() if stage.state.lower() != "running"
    ]
    return parts + ([", ".join(busy)] if busy else [])


def open_view(stream: TextIO) -> LiveView | PlainView:
    """Return a live view if `stream` is a terminal that can redraw lines. For any other `stream`, return a view that
    writes plain lines.
    """
    console = Console(file=stream)
    return LiveView(console=console) if console.is_terminal and not console.is_dumb_terminal else PlainView(stream)


def print_summary(summary: Mapping[str, Any], stream: TextIO | None = None, *, console: Console | None = None) -> None:
    """Print the closing summary of a run (the content of `summary.json`). Missing keys are left out."""
    console = console or Console(file=stream, highlight=False)
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in _summary_rows(summary):
        table.add_row(label, value)
    clean = summary.get("audit", "clean") == "clean"
    title = Text.assemble((" rollflow ", "bold"), (str(summary.get("run_id", "")), "cyan"), " ")
    console.print(Panel(table, title=title, title_align="left", border_style="green" if clean else "red", expand=False))


def cpu_line(seconds: Mapping[str, float]) -> str:
    """Format the run's CPU seconds: the total, the share of each role, and the share of all roles that only watch the
    run.
    """
    total = max(sum(seconds.values()), 1e-9)
    shares = [f"{role} {used / total:.0%}" for role, used in seconds.items() if used / total >= WORTH_SAYING]
    watching = sum(used for role, used in seconds.items() if role in WATCHING)
    return f"{total:,.0f} s: {', '.join(shares)}; watching {watching / total:.1%}"


def _change_rows(label: str, before: float | None, after: float | None) -> list[tuple[str, Text]]:
    """Return a row of the summary with an old and a new value. Return no row if the old or the new value is unknown."""
    if before is None or after is None:
        return []
    now = Text(f"{after:.1%}", style="bold green" if after > before else "bold red")
    return [(label, Text(f"{before:.1%} → ") + now)]


def _no_signal_rows(summary: Mapping[str, Any]) -> list[tuple[str, Text]]:
    """Return the row of the summary that counts policy versions in which nothing was learned. Return no row if
    something was learned in every policy version.
    """
    if not (lost := (summary.get("no_signal") or {}).get("versions")):
        return []
    said = f"nothing was learned in {lost} of {summary.get('versions', lost)} versions: no row had an advantage"
    return [("no signal", Text(said, style="bold red"))]


def _wait_rows(summary: Mapping[str, Any]) -> list[tuple[str, Text]]:
    """Return the rows of the summary that say how long the run waited for slow response groups or newer policy
    versions, and which configuration key would change that.
    """
    rows: list[tuple[str, Text]] = []
    if summary.get("async_ratio") and summary.get("held_back_by_alpha", 0) >= WORTH_SAYING:
        held = f"{summary['held_back_by_alpha']:.0%} of the time free engine slots waited for a newer policy version"
        cure = "a larger async_ratio would use them; that saves time if engines and learner do not share cores or GPUs"
        rows.append(("held back by alpha", Text(f"{held}; {cure}")))
    if summary.get("async_ratio") and summary.get("waited_at_the_bound", 0) >= WORTH_SAYING:
        waited = (
            f"{summary['waited_at_the_bound']:.0%} of the time a full batch and the learner waited for slow responses"
        )
        cure = "a larger async_ratio with the same rollout.max_batches_ahead would not"
        rows.append(("waited at the bound", Text(f"{waited}; {cure}")))
    if summary.get("dropped_tokens", 0) >= WORTH_SAYING:
        dropped = f"{summary['dropped_tokens']:.0%} of the tokens were in responses too slow for their batch"
        cure = 'rollout.on_stale = "wait", with no redundant_groups, keeps them'
        rows.append(("dropped", Text(f"{dropped}; {cure}", style="yellow")))
    return rows


def _summary_rows(summary: Mapping[str, Any]) -> list[tuple[str, Text]]:
    rows: list[tuple[str, Text]] = []
    accuracy, passes = summary.get("accuracy") or {}, summary.get("pass_at") or {}
    rows += _change_rows("held-out accuracy", accuracy.get("before"), accuracy.get("after"))
    for k, after in (passes.get("after") or {}).items():
        rows += _change_rows(f"held-out pass@{k}", (passes.get("before") or {}).get(k), after)
    for name, points in (summary.get("measures") or {}).items():
        figures = [f"{value:.4f}" for value in points.values()]
        rows.append((name, Text(" → ".join([*figures[:1], *figures[1:][-1:]]))))
    for version, reason in (summary.get("not_evaluated") or {}).items():
        rows.append(("not evaluated", Text(f"version {version}: {reason}")))
    if "versions" in summary:
        took = f" in {format_duration(summary['seconds'])}" if "seconds" in summary else ""
        rows.append(("versions", Text(f"{summary['versions']}{took}")))
    rows += _no_signal_rows(summary)
    rows += [("alarm", Text(alarm, style="bold yellow")) for alarm in summary.get("alarms") or ()]
    if "tokens_per_second" in summary:
        rows.append(("generation", Text(f"{summary['tokens_per_second']:,.0f} tokens/s")))
    if summary.get("staleness"):
        counts = {int(key): int(count) for key, count in summary["staleness"].items()}
        bound = Text(f"  (bound {summary['async_ratio']})", style="dim") if "async_ratio" in summary else Text()
        rows.append(("staleness", staleness_bar(counts, 24) + bound))
    if len(domains := summary.get("domains") or {}) > 1:
        rows.append(("domains", Text("   ".join(_format_domain(name, figures) for name, figures in domains.items()))))
    if sets := summary.get("evaluation_sets"):
        rows.append(("sets", Text("   ".join(f"{name} {accuracy:.1%}" for name, accuracy in sets.items()))))
    if newest := {name: list(shares.values())[-1] for name, shares in (summary.get("skipped") or {}).items() if shares}:
        rows.append(("skipped", Text(_format_skipped(newest))))
    if summary.get("idle"):
        rows.append(("idle", Text("   ".join(f"{name} {share:.0%}" for name, share in summary["idle"].items()))))
    rows += _wait_rows(summary)
    if summary.get("cpu_seconds"):
        rows.append(("cpu", Text(cpu_line(summary["cpu_seconds"]))))
    if summary.get("prefix_cache_hits", 0) >= WORTH_SAYING:
        rows.append(("prefix cache", Text(f"{summary['prefix_cache_hits']:.0%} of the prompts' tokens")))
    if drafts := summary.get("speculation"):
        share = drafts["accepted"] / max(drafts["drafted"], 1)
        said = f"{drafts['tokens_per_step']:.2f} tokens a step with a draft, {share:.0%} of the drafted tokens accepted"
        rows.append(("speculation", Text(said)))
    if summary.get("recoveries"):
        rows.append(("recoveries", Text("   ".join(f"{role} {n}" for role, n in summary["recoveries"].items()))))
    if "audit" in summary:
        style = "green" if summary["audit"] == "clean" else "bold red"
        rows.append(("audit", Text(str(summary["audit"]), style=style)))
    for key in ("storage", "prefect", "mlflow"):
        if place := str(summary.get(key) or ""):
            command = "" if key == "storage" or "://" in place else "shown by "
            rows.append((key, Text.assemble(command, (place, "cyan"))))
    return rows
