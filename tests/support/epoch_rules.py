"""Checks the rules of epochs (passes over the questions of a file) in a second formulation, question by question, from
all log entries.

The module uses neither rollflow's computation of the state from the log (the fold) nor `rollflow.tasks.prompts.epochs`.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tests.support.log_model import Model

if TYPE_CHECKING:
    from tests.support.schedules import Case


@dataclass(frozen=True)
class Questions:
    """A number of questions, which each epoch asks in a different order."""

    questions: int
    seed: int

    @property
    def count(self) -> int:
        return self.questions

    def order(self, epoch: int) -> list[int]:
        order = list(range(self.questions))
        random.Random(f"{self.seed}:{epoch}").shuffle(order)
        return order


def check_epochs(model: Model, case: Case) -> None:
    """Check every epoch of a schedule: which questions it asks and skips, and that every question is asked again."""
    for source in range(model.sources):
        if model.skips(source):
            _check_source(model, case, source)
        else:
            assert model.epochs(source) == []


def _check_source(model: Model, case: Case, source: int) -> None:
    questions = case.questions[source]
    asked_in = defaultdict[int, list[int]](list)  # question -> the epochs that ask it
    epochs, solved = model.epochs(source), set[int]()
    for number, entry in enumerate(epochs):
        body = entry["body"]
        skipped = {question for question in solved if (question + number) % case.solved_every != 0}
        assert set(body["skipped"]) == skipped, f"epoch {number} of source {source}"
        order = [question for question in Questions(questions, case.seed).order(number) if question not in skipped]
        assert len(order) == body["asked"]
        for question in order:
            asked_in[question].append(number)
        end = epochs[number + 1]["n"] if number + 1 < len(epochs) else len(model.entries)
        rates = _last_rates(model, entry["n"], end)
        passed = (rates.get((body["start"] + place) * model.sources + source) for place in range(body["asked"]))
        solved = skipped | {one for one, rate in zip(order, passed, strict=True) if rate and rate[0] == rate[1]}
    for question in range(questions):
        gaps = [-1, *asked_in[question], len(epochs)]
        assert all(b - a <= case.solved_every for a, b in pairwise(gaps)), "a question is lost"
        assert max(Counter(asked_in[question]).values(), default=0) <= 1, "asked twice in an epoch"


def _last_rates(model: Model, first: int, end: int) -> dict[int, tuple[int, int]]:
    """Return the pass rate of each prompt in the entries from `first` to `end - 1`, without voided batches."""
    rates: dict[int, tuple[int, int]] = {}
    for entry in model.entries[first:end]:
        body = entry["body"]
        if body["kind"] == "batch-committed":
            rates |= {prompt: (correct, of) for prompt, correct, of in body["rates"]}
        elif body["kind"] == "batch-voided" and body["entry"] >= first:
            for prompt, *_ in model.entries[body["entry"]]["body"]["groups"]:
                rates.pop(prompt, None)
    return rates
