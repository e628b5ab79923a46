"""Plans the epochs of prompt sources that ask solved questions less often (`prompts.solved_every`).

    epoch 0    asks every question
    epoch k    asks every unsolved question, and each solved question in one of `solved_every` epochs

A question is *solved* if its pass rate in the previous epoch was at least `solved_from`, or if the previous epoch
skipped it. A question whose group of responses is not complete counts as unsolved.

The scheduler appends an entry `EpochStarted` to the log before the first prompt of an epoch. A restarted scheduler
reads the entry of the epoch, and issues the same prompts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol, TypeGuard

from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import EpochStarted, entry_path
from rollflow.storage.log.pass_rates import PassRates
from rollflow.storage.log.reading import get_entry, iterate_written
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.log.state import NOBODY, EntryRefused, EpochPlace, RunState
from rollflow.storage.records import PassRate, StoredObject
from rollflow.tasks.prompts.config import FileBase

CACHED = 8  # number of epochs whose questions are kept in memory


class EpochSource(Protocol):
    """A prompt source with a finite number of questions, which are numbered from 0."""

    @property
    def count(self) -> int:
        """Number of training questions."""

    def order(self, epoch: int) -> Sequence[int]:
        """Return the numbers of all training questions in the order in which the epoch asks them."""


@dataclass(frozen=True, slots=True)
class SkipRule:
    """The rule that decides when a question is solved, and how often solved questions are asked."""

    every: int
    solved_from: float

    @classmethod
    def of(cls, config: FileBase) -> SkipRule:
        """Build the rule from the config of a prompt source."""
        return cls(config.solved_every, config.solved_from)

    def is_solved(self, rate: PassRate) -> bool:
        """Return whether a question with this pass rate counts as solved."""
        return rate.correct / rate.responses >= self.solved_from

    def choose_skipped(self, number: int, solved: Iterable[int]) -> tuple[int, ...]:
        """Return the solved questions that epoch `number` skips, in ascending order."""
        return tuple(sorted({question for question in solved if (question + number) % self.every}))


def list_asked(order: Sequence[int], skipped: Iterable[int]) -> list[int]:
    """Return the indices, in the order of an epoch, of the questions that are not skipped."""
    gone = frozenset(skipped)
    return [place for place, question in enumerate(order) if question not in gone]


class _Head(NamedTuple):
    """The fields of an `EpochStarted` log entry that stay in memory."""

    number: int
    start: int
    end: int
    before: int | None


class Epochs:
    """The epochs of all prompt sources that skip solved questions, as recorded in the log."""

    def __init__(self, log: Log, configs: Sequence[object], sources: Sequence[object]) -> None:
        """Find the prompt sources in `configs` that skip solved questions; `sources` has the questions of each prompt
        source.
        """
        self._log, self._count = log, len(configs)
        self._rules = {which: SkipRule.of(one) for which, one in enumerate(configs) if skips_solved(one)}
        self._sources: dict[int, EpochSource] = {which: sources[which] for which in self._rules}  # type: ignore[misc]
        self._heads: dict[int, _Head] = {}  # log entry -> its fields that stay in memory
        self._asked = lru_cache(CACHED)(self._read_asked)
        # The epochs are cached, so that issuing prompts does not wait for storage.
        for prompt in log.state.open if self._rules else ():
            self.locate(prompt % self._count, prompt // self._count)

    def locate(self, source: int, position: int) -> int:
        """Return the position that the prompt would have if no epoch skipped a question.

        Raises:
            Corrupt: no epoch in the log contains the prompt.
        """
        if source not in self._rules:
            return position
        if position >= self._log.state.epochs[source].end:
            self._log.follow()
        place = self._log.state.epochs[source]
        entry = None if place.entry == NOBODY or position >= place.end else place.entry
        while entry is not None:
            head = self._read_head(entry)
            if position >= head.start:
                return head.number * self._sources[source].count + self._asked(source, entry)[position - head.start]
            entry = head.before
        raise Corrupt(
            f"prompt {position} of prompt source {source} belongs to no epoch that the log of "
            f"{self._log.store.uri} records"
        )

    def start(self, writer: Writer, source: int, position: int) -> int:
        """Append the log entry of the epoch at a position, unless it exists; return the end of the epoch.

        Raises:
            Deposed: a newer process has replaced this process as the run's scheduler.
        """
        log = writer.log
        while (newest := log.state.epochs[source]).end <= position:
            decision = _Decision(self, log, source, newest)
            # Most log entries are read before the append, because an append blocks other appends.
            decision.read_rates(log.state.n)
            try:
                writer.append(decision)
            except EntryRefused:
                if log.state.epochs[source] == newest:
                    raise
        self.locate(source, position)  # caches the epoch, so that issuing prompts does not wait for storage
        return newest.end

    def propose(
        self, source: int, last: EpochStarted | None, entry: int | None, rates: Mapping[int, PassRate]
    ) -> EpochStarted:
        """Return the `EpochStarted` entry that must follow epoch `last`, which log entry `entry` started.

        Args:
            rates: pass rates by prompt, from the log entries between the start of epoch `last` and the start of the new
            epoch.
        """
        questions = self._sources[source]
        if last is None:
            return EpochStarted(source, 0, 0, questions.count)
        order = questions.order(last.number)
        solved = set(last.skipped)
        for position, place in enumerate(list_asked(order, last.skipped), last.start):
            rate = rates.get(position * self._count + source)
            if rate is not None and self._rules[source].is_solved(rate):
                solved.add(order[place])
        skipped = self._rules[source].choose_skipped(last.number + 1, solved)
        return EpochStarted(source, last.number + 1, last.end, questions.count - len(skipped), skipped, entry)

    def _read_head(self, entry: int) -> _Head:
        if entry not in self._heads:
            body = read_epoch(self._log, entry)
            self._heads[entry] = _Head(body.number, body.start, body.end, body.before)
        return self._heads[entry]

    def _read_asked(self, source: int, entry: int) -> list[int]:
        body = read_epoch(self._log, entry)
        return list_asked(self._sources[source].order(body.number), body.skipped)


class _Decision:
    """Computes the `EpochStarted` entry of a prompt source's next epoch from earlier log entries, at each attempt to
    append it.
    """

    def __init__(self, epochs: Epochs, log: Log, source: int, newest: EpochPlace) -> None:
        self._epochs, self._log, self._source, self._newest = epochs, log, source, newest
        self._entry = None if newest.entry == NOBODY else newest.entry
        self._last = None if self._entry is None else read_epoch(log, self._entry)
        self._rates, self._read = PassRates(), newest.entry

    def read_rates(self, n: int) -> None:
        """Read the pass rates of prompts from the log, up to entry `n`."""
        if self._last is not None:
            for written in iterate_written(self._log, self._read + 1, n):
                self._rates.add(written.entry)
            self._read = n

    def __call__(self, state: RunState, _: StoredObject | None) -> EpochStarted:
        if state.epochs[self._source] != self._newest:
            raise EntryRefused(
                f"the next epoch of prompt source {self._source} has started already, so it cannot start again"
            )
        self.read_rates(state.n)
        return self._epochs.propose(self._source, self._last, self._entry, self._rates.rates)


def share_skipped(state: RunState, domains: Sequence[str]) -> dict[str, float]:
    """Return, for each domain, the share of questions that its newest epoch skips; `domains` has the domain of each
    prompt source. Domains whose sources never skip questions are left out.
    """
    asked, skipped = Counter[str](), Counter[str]()
    for source, epoch in state.epochs.items():
        asked[domains[source]] += epoch.asked
        skipped[domains[source]] += epoch.skipped
    return {domain: skipped[domain] / max(asked[domain] + skipped[domain], 1) for domain in asked}


def list_epochs(log: Log, source: int) -> list[EpochStarted]:
    """List the epochs of a prompt source, oldest first; raise `Corrupt` if a log entry is damaged."""
    found: list[EpochStarted] = []
    place = log.state.epochs.get(source, EpochPlace())
    entry = None if place.entry == NOBODY else place.entry
    while entry is not None:
        found.append(read_epoch(log, entry))
        entry = found[-1].before
    return found[::-1]


def skips_solved(config: object) -> TypeGuard[FileBase]:
    """Return whether a prompt source asks solved questions less often than unsolved ones."""
    return isinstance(config, FileBase) and config.solved_every > 1


def read_epoch(log: Log, entry: int) -> EpochStarted:
    """Read a log entry that starts an epoch; raise `Corrupt` if the entry is damaged or of another kind."""
    body = get_entry(log, entry).entry.body
    if not isinstance(body, EpochStarted):
        raise Corrupt(f"log entry {entry_path(entry)} should record the start of an epoch, but records something else")
    return body
