"""Collects the pass rates of prompts (the share of correct responses) from a range of a run's log.

If several groups of responses to a prompt have been generated, the pass rate of the newest group is used. The pass
rates of groups in a voided batch are not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rollflow.storage.log.entries import BatchCommitted, BatchVoided, Entry
from rollflow.storage.records import PassRate


@dataclass(slots=True)
class PassRates:
    """The known pass rates of prompts, collected from the log entries that were added."""

    rates: dict[int, PassRate] = field(default_factory=dict)  # pass rate of each prompt's newest group of responses
    _batches: dict[int, set[int]] = field(default_factory=dict)  # maps a batch's log entry to the batch's prompts

    @classmethod
    def collect(cls, entries: Iterable[Entry]) -> PassRates:
        """Collect the pass rates of prompts from the given log entries, oldest entry first."""
        found = cls()
        for entry in entries:
            found.add(entry)
        return found

    def add(self, entry: Entry) -> None:
        """Add the pass rates that the next log entry contains."""
        match entry.body:
            case BatchCommitted() as body:
                self.rates |= {rate.prompt: rate for rate in body.rates}
                self._batches[entry.n] = {group.prompt for group in body.groups}
            case BatchVoided() as body:
                for prompt in self._batches.pop(body.entry, ()):
                    self.rates.pop(prompt, None)
