"""Defines the point at which a scheduler starts or resumes a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollflow.storage.log.state import RunState
from rollflow.storage.records import Cursor, GroupKey


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point at which a scheduler starts a run: the beginning, or a state restored from the run's log."""

    number: int = 0  # number of the first training batch that was never committed
    cursor: Cursor = field(default_factory=Cursor)
    again: tuple[GroupKey, ...] = ()
    missing: tuple[int, ...] = ()  # numbers of the voided (rejected) training batches that have to be formed again
    voids: int = 0  # number of training batches that were voided (rejected) so far
    behind: tuple[tuple[int, int], ...] = ()  # pairs (prompt, number of preemptions of the prompt)
    redraws: tuple[tuple[int, int], ...] = ()  # pairs (prompt, number of its batches that led to NaN weights)
    # pairs (source, position after the last prompt of the newest epoch), for each source that skips solved questions
    epochs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_state(cls, state: RunState) -> ResumePoint:
        """Build the resume point of a run with this recorded state."""
        return cls(
            number=state.next_batch,
            cursor=state.cursor,
            again=state.in_flight,
            missing=tuple(state.holes),
            voids=state.voids,
            behind=tuple(state.behind.items()),
            redraws=tuple(state.redraws.items()),
            epochs=tuple((source, epoch.end) for source, epoch in state.epochs.items()),
        )
