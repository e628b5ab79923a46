"""Tracks what an audit expects of the next log entries while the audit reads a run's log.

An audit expects that batches follow the limits of the config under which they were formed, and contain the right
prompts. It also expects that no prompt stays unfinished for too long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollflow.storage.audit.answers import ExpectedRows
from rollflow.storage.audit.expected import BatchLimits, Expected
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.storage.log.configs import RecordedConfig
from rollflow.storage.log.entries import BatchCommitted, EpochStarted, decode, entry_path
from rollflow.storage.log.pass_rates import PassRates
from rollflow.storage.log.reading import read_entries
from rollflow.storage.log.state import RunState
from rollflow.storage.objects.base import ObjectStore
from rollflow.storage.records import PassRate

LONG = 4  # a prompt that is in flight for more than LONG * (async_ratio + 1) batches is overdue
SHOWN = 5  # the largest number of questions that the text of a violation names
MOST_OVERDUE = 20  # the largest number of overdue prompts that are listed


class Expecting:
    """What an audit compares batches with: the run's prompts, and the limits of the config that applies to the current
    log entry.
    """

    def __init__(self, expected: Expected, report: AuditReport) -> None:
        self._limits_of, self._prompts, self._report = expected.limits, expected.prompts, report
        self.limits: BatchLimits | None = None
        report.unchecked = expected.unchecked

    @property
    def is_thorough(self) -> bool:
        """True if the audit compares batches with both limits and prompts."""
        return self._limits_of is not None and self._prompts is not None

    def take_config(self, config: Mapping[str, Any]) -> None:
        """Compare all later log entries with the limits of the given config."""
        try:
            self.limits = self._limits_of(config) if self._limits_of else None
        except Corrupt as error:
            self._give_up(f"prompts and limits are not checked against the config, because {error}")
            self.limits = None

    def resume_config(self, run: ObjectStore, state: RunState) -> None:
        """Use the config that was current when an earlier audit ended; `state` is the run's state at that time."""
        n = state.configs[-1].entry
        try:
            self.take_config(RecordedConfig.of(decode(run.get(entry_path(n)), n, run.get).entry).config)
        except (Missing, Corrupt) as error:
            self._give_up(f"prompts and limits are not checked against the config, because {error}")

    def expect_rows(self, body: BatchCommitted | None) -> ExpectedRows:
        """Return the values with which a batch file is compared; `body` is None for any other stored object.

        Only the audit's main thread may call this method, because prompt sources are not thread-safe.
        """
        prompts = self._prompts
        if body is None or prompts is None:
            return ExpectedRows(self.limits)
        try:
            found = {group.prompt: prompts.ask(group.prompt) for group in body.groups}
        except ConfigError as error:  # the prompts cannot be made, for example because a prompt file was changed
            self._give_up(f"prompts are not checked, because {error}")
            return ExpectedRows(self.limits)
        asked = {index: prompt for index, (prompt, _) in found.items()}
        held = frozenset(index for index, (_, is_held_out) in found.items() if is_held_out)
        return ExpectedRows(self.limits, asked, held, prompts.held_out, prompts.vocabulary, prompts.stops)

    def check_epoch(self, run: ObjectStore, n: int, body: EpochStarted) -> None:
        """Report log entry `n` if the entry does not start the epoch that follows from the earlier log
        entries."""
        propose = self._prompts.propose_epoch if self._prompts else None
        if propose is None:
            return
        try:
            last, rates = _read_since(run, body.before, n)
            proposed = propose(body.source, last, body.before, rates)
        except (Missing, Corrupt):  # an unreadable log entry is reported elsewhere
            return
        except ConfigError as error:
            self._give_up(f"prompts are not checked, because {error}")
            return
        wrong, lost = sorted({*body.skipped} - {*proposed.skipped}), sorted({*proposed.skipped} - {*body.skipped})
        shown = f"it skips {_list_some(wrong)} without reason, and does not skip {_list_some(lost)}"
        if wrong or lost or body.asked != proposed.asked:
            what = (
                f"epoch {body.number} of source {body.source} asks {body.asked} questions instead of {proposed.asked}"
            )
            self._report.add("lineage", entry_path(n), f"{what}: {shown}")

    def _give_up(self, why: str) -> None:
        self._prompts, self._report.unchecked = None, why


def _read_since(run: ObjectStore, before: int | None, n: int) -> tuple[EpochStarted | None, Mapping[int, PassRate]]:
    """Return the epoch that log entry `before` started, and the pass rates in the log entries between `before` and
    `n`."""
    if before is None:
        return None, {}
    last = decode(run.get(entry_path(before)), before, run.get).entry.body
    if not isinstance(last, EpochStarted):
        raise Corrupt(f"log entry {entry_path(before)} should record the start of an epoch, but records something else")
    rates = PassRates()
    for number, found in read_entries(run, before + 1):
        if number >= n:
            break
        if not isinstance(found, bytes):
            raise Corrupt(f"log entry {entry_path(number)} cannot be read")
        rates.add(decode(found, number, run.get).entry)
    return last, rates.rates


def _list_some(questions: Sequence[int]) -> str:
    """Return a text that names the first few of the given questions."""
    more = f" and {len(questions) - SHOWN} more" if len(questions) > SHOWN else ""
    return f"questions {', '.join(map(str, questions[:SHOWN]))}{more}" if questions else "no question"


@dataclass(slots=True)
class OpenSince:
    """Records for each prompt in flight the number of the next batch at the time when the prompt was issued."""

    batches: dict[int, int] = field(default_factory=dict)  # maps a prompt to the number of a batch

    def commit(self, body: BatchCommitted, after: RunState) -> None:
        """Remove the prompts whose groups a batch committed or discarded, and add the prompts that were issued with
        this batch."""
        ended = {*(group.prompt for group in body.groups), *(discard.key.prompt for discard in body.discards)}
        self.batches = {prompt: since for prompt, since in self.batches.items() if prompt not in ended}
        self.note(after)

    def note(self, after: RunState) -> None:
        """Add the prompts in flight that are not recorded yet."""
        self.batches |= {prompt: after.next_batch for prompt in after.open if prompt not in self.batches}

    def list_overdue(self, state: RunState) -> list[str]:
        """List the prompts that have been in flight for too long (see `LONG`), the oldest first."""
        limit = LONG * (int(state.alpha) + 1)
        ages = {prompt: state.next_batch - since for prompt, since in self.batches.items() if prompt in state.open}
        late = sorted((prompt for prompt in ages if ages[prompt] > limit), key=lambda prompt: -ages[prompt])
        newest = state.next_batch
        return [
            f"prompt {one} has been in flight since batch {newest - ages[one]}; the next batch is {newest}"
            for one in late[:MOST_OVERDUE]
        ]
