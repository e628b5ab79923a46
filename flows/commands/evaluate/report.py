"""Counts the responses of an evaluation, and shows the accuracies with their intervals as a table or as JSON.

Each accuracy (share of right responses) is shown with its 95% confidence interval by Wilson's formula. If a prompt has
several responses, the interval is computed for a smaller number of responses (`effective_size`), because responses to
one prompt are not independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollflow.storage.records import Outcome
from rollflow.tasks.rollout.evaluation import EvaluatedResponse, is_right, safe_name
from rollflow.tasks.statistics.proportions import PromptResult, effective_size, pass_at, wilson_interval

HELD_OUT = "held out"  # name of the row for all held-out prompts of the recipe


@dataclass(slots=True)
class ResponseCounts:
    """Counts of the responses to some prompts. A response that the scorer could not judge is counted only in
    `unjudged`.
    """

    prompts: dict[int, PromptResult] = field(default_factory=dict)  # results by the index of the prompt
    responses: int = 0
    unjudged: int = 0
    reward: float = 0.0  # sum of the rewards
    tokens: int = 0
    turns: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def add(self, one: EvaluatedResponse, right: bool) -> None:
        """Count a response; `right` says whether it is correct."""
        self.outcomes[one.score.outcome.value] += 1
        if one.score.outcome is Outcome.UNJUDGED:
            self.unjudged += 1
            return
        before = self.prompts.get(one.prompt.index, PromptResult(0, 0))
        self.prompts[one.prompt.index] = PromptResult(before.responses + 1, before.right + right)
        self.responses += 1
        self.reward += one.score.value
        self.tokens += len(one.versions)
        self.turns += one.turns

    @property
    def accuracy(self) -> float:
        """The share of right responses; NaN without responses."""
        return sum(one.right for one in self.prompts.values()) / self.responses if self.responses else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the accuracy."""
        return wilson_interval(self.accuracy, effective_size(self.prompts.values()))

    def find_pass_at(self, k: int) -> float | None:
        """Return the mean pass@k of the prompts with at least k responses; None if there is no such prompt."""
        asked = [one for one in self.prompts.values() if one.responses >= k]
        return math.fsum(pass_at(k, *one) for one in asked) / len(asked) if asked else None


@dataclass(slots=True)
class EvaluationReport:
    """The results of an evaluation so far. `asked` is the number of responses that the whole evaluation requests."""

    policy: str
    version: int
    samples: int
    asked: int
    by_value: bool  # True if a response with the reward 1 is right, whatever its outcome
    sets: frozenset[str] = frozenset()  # names of the evaluation sets, which are the domains of their prompts
    counts: dict[str, ResponseCounts] = field(default_factory=dict)  # by name of domain or evaluation set
    unjudged: str = ""  # reason why the first unjudged response could not be judged
    measures: Mapping[str, float] = field(default_factory=dict)  # measures of the environment by name

    def add(self, one: EvaluatedResponse) -> None:
        """Count a response."""
        domain = one.prompt.domain
        for name in (domain,) if domain in self.sets else (HELD_OUT, domain):
            self.counts.setdefault(name, ResponseCounts()).add(one, is_right(one.score, self.by_value))
        if one.score.outcome is Outcome.UNJUDGED:
            self.unjudged = self.unjudged or one.score.reason

    @property
    def done(self) -> int:
        """The number of responses that were scored, including those that could not be judged."""
        names = (HELD_OUT, *self.sets)
        return sum(self.counts[name].outcomes.total() for name in names if name in self.counts)

    @property
    def rows(self) -> Iterator[tuple[str, ResponseCounts]]:
        """The rows to show: all held-out prompts, their domains if there are several, and the evaluation sets."""
        domains = [name for name in self.counts if name != HELD_OUT and name not in self.sets]
        named = [HELD_OUT, *(sorted(domains) if len(domains) > 1 else []), *sorted(self.sets)]
        return ((name, self.counts[name]) for name in named if name in self.counts)

    @property
    def powers(self) -> list[int]:
        """The numbers k for which pass@k is shown: 2, 4, 8, ... and the number of samples."""
        powers = [2**power for power in range(1, self.samples.bit_length())]
        return sorted({*powers, *([self.samples] if self.samples > 1 else [])})

    def build_value(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "policy": self.policy,
            "version": self.version,
            "samples": self.samples,
            "asked": self.asked,
            "done": self.done,
            "unjudged": sum(counts.unjudged for name, counts in self.counts.items() if name in (HELD_OUT, *self.sets)),
            "groups": {name: self._build_counts(counts) for name, counts in self.rows},
            **({"measures": dict(self.measures)} if self.measures else {}),
        }

    def _build_counts(self, counts: ResponseCounts) -> dict[str, Any]:
        known = counts.responses
        return {
            "prompts": len(counts.prompts),
            "responses": known,
            "accuracy": counts.accuracy if known else None,
            "interval": list(counts.interval),
            "reward": counts.reward / known if known else None,
            "pass_at": {str(k): found for k in self.powers if (found := counts.find_pass_at(k)) is not None},
            "tokens": counts.tokens / known if known else None,
            "turns": counts.turns / known if known else None,
            "outcomes": dict(counts.outcomes),
        }

    @property
    def metrics(self) -> Mapping[str, float]:
        """The report as metrics, whose names contain only letters, digits and underscores."""
        return {safe_name(name): value for name, value in self.measures.items()} | dict(_list_metrics(self))


def _list_metrics(report: EvaluationReport) -> Iterator[tuple[str, float]]:
    for name, counts in report.rows:
        if not counts.responses:
            continue
        end = "" if name == HELD_OUT else f"_{safe_name(name)}"
        low, high = counts.interval
        yield f"accuracy{end}", counts.accuracy
        yield f"accuracy_low{end}", low
        yield f"accuracy_high{end}", high
        yield f"reward{end}", counts.reward / counts.responses
        for k in report.powers:
            if (found := counts.find_pass_at(k)) is not None:
                yield f"pass_at_{k}{end}", found


def print_report(report: EvaluationReport, console: Console) -> None:
    """Print the report as a table, and the number of responses that the table leaves out."""
    console.print(Text(report.policy, style="bold"), soft_wrap=True)
    if report.done:
        console.print(_build_table(report))
        for line in _list_passes(report):
            console.print(line, markup=False)
        for name, value in report.measures.items():
            console.print(f"{name} {value:.4f}", markup=False)
    if report.done < report.asked:
        console.print(f"stopped after {report.done:,} of {report.asked:,} responses", soft_wrap=True)
    if missing := sum(counts.unjudged for name, counts in report.rows if name in (HELD_OUT, *report.sets)):
        said = f"{missing:,} responses could not be judged and are left out, the first: {report.unjudged}"
        console.print(said, soft_wrap=True, markup=False)


def _list_passes(report: EvaluationReport) -> Iterator[str]:
    """Return a line with pass@k for each row of the table, because columns for every k would not fit a terminal."""
    for name, counts in report.rows if report.powers else ():
        known = ((k, counts.find_pass_at(k)) for k in report.powers)
        found = ", ".join(f"pass@{k} {share:.3f}" for k, share in known if share is not None)
        yield f"{name}: {found or 'no prompt has all its samples yet'}"


def _build_table(report: EvaluationReport) -> Table:
    rows = list(report.rows)
    several_turns = any(counts.turns > counts.responses for _, counts in rows)
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("prompts of")
    for name in ("responses", "accuracy", "95% interval", "reward", "tokens"):
        table.add_column(name, justify="right", no_wrap=True)
    if several_turns:
        table.add_column("turns", justify="right")
    for name, counts in rows:
        low, high = counts.interval
        known = counts.responses
        means = (counts.reward / known, counts.tokens / known, counts.turns / known) if known else (math.nan,) * 3
        cells = [f"{known:,}", f"{counts.accuracy:.3f}", f"{low:.3f} - {high:.3f}"]
        cells += [f"{means[0]:.3f}", f"{means[1]:.1f}", *([f"{means[2]:.1f}"] if several_turns else [])]
        table.add_row(Text(name), *cells, style="bold" if name == HELD_OUT else "")
    return table
