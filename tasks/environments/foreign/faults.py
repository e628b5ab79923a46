"""Defines the errors of an environment's process, and how an episode is scored after such an error.

| what happened | episode |
|---|---|
| the process cannot start, or the import fails | unjudged |
| the creation or the reset of the environment fails or hangs | unjudged |
| a step or a tool call hangs | scored on the state reached, as a time-out |
| a step, or the reward, raises an error | scored on the state reached, as unparsable |
| the process ends itself in a step, or writes an invalid answer | scored on the state reached, as killed |
| the process is killed from outside, or the keeper of the processes dies | unjudged |
"""

from __future__ import annotations

import os
import signal

from rollflow.storage.records import Outcome

# signals with which the system or a person ends a process; a policy cannot have caused these signals
FROM_OUTSIDE = {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}


class CallFailed(Exception):
    """Raised if the user's code has raised an error in a call; the process continues."""


class WorldEnded(Exception):
    """Raised if the process of an episode cannot be used any more.

    `outcome` is `UNJUDGED` if the policy cannot have caused the end.
    """

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(reason)
        self.outcome = outcome

    @property
    def is_unjudged(self) -> bool:
        """True if the policy cannot have caused the end."""
        return self.outcome is Outcome.UNJUDGED


def judge_status(status: int, what: str) -> WorldEnded:
    """Return the error for a process that has ended with this wait status during `what`."""
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
