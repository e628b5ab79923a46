"""Defines the errors of an environment's process, and how an episode is scored after such an error.

| what happened | episode |
|---|---|
| the process cannot start, or the import fails | unjudged |
| the creation or the reset of the environment fails or hangs | unjudged |
| a step or a tool call hangs | scored on the state reached, as a time-out |
| a step, or the reward, raises an error | scored on the state reached, as unparsable |
| the process ends itself in a step, or writes an invalid answer | scored on the state reached, as killed |
| the process is killed from outside, or the first worker process dies | unjudged |
"""

from __future__ import annotations

import math
import os
import signal

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import FAILED, LONGEST_FAILURE, Score, make_storable

# signals with which the system or a person ends a process; the policy cannot have caused such an end
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class CallFailed(Exception):
    """Raised if the user's code has raised an error in a call; the process continues."""


class WorldEnded(Exception):
    """Raised if the worker process of an episode cannot be used any more.

    `outcome` is `UNJUDGED` if the policy cannot have caused the end of the process. `is_counted` is true if the end was
    already counted as a failure.
    """

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome, self.is_counted = outcome, False

    @property
    def is_unjudged(self) -> bool:
        """True if the policy cannot have caused the end."""
        return self.outcome is Outcome.UNJUDGED


def judge_status(status: int, what: str) -> WorldEnded:
    """Return the error for a process that ended with this wait status; `what` names the call that was running."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        outcome = Outcome.UNJUDGED if number in FROM_OUTSIDE else Outcome.KILLED
        return WorldEnded(outcome, f"its process was killed by {_name_signal(number)} during {what}")
    return WorldEnded(Outcome.KILLED, f"its process exited with code {os.WEXITSTATUS(status)} during {what}")


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal has no name
        return f"signal {number}"


def score_fault(name: str, value: float, reason: str, outcome: Outcome) -> Score:
    """Return the score of an episode that ended because of a fault in the environment `name`."""
    text = make_storable(f"{name}{FAILED}{reason}", LONGEST_FAILURE)
    return Score(value if math.isfinite(value) else 0.0, text, outcome, failed=outcome is not Outcome.UNJUDGED)
