"""Calls the optional methods with which an environment survives a crash of the run.

A class may define:

- `snapshot(self) -> bytes`, which returns the state of an episode after a turn. `restore(self, data)` is called after a
  reset, and restores this state.
- `begin_action(self, action_key)`, which is called before each action. `begin_action` returns the result of the action
  if the action was done before, or None.
- `can_replay = False`, which means that actions must not be done a second time.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable
from typing import Any

from rollflow.tasks.environments.guest.wire import LARGEST_SNAPSHOT, Fields


class DurableParts:
    """The optional methods of a user's environment object."""

    def __init__(self, own: Any, finish: Callable[[Any], Any] = lambda result: result) -> None:
        """Find the optional methods of `own`; `finish` waits for the result of an asynchronous method."""
        self._own, self._finish = own, finish
        snapshot, restore = getattr(own, "snapshot", None), getattr(own, "restore", None)
        self.has_snapshots = callable(restore) and returns_bytes(snapshot)
        self._begin = find_begin(own)

    @property
    def names(self) -> set[str]:
        """The names of the optional methods, which the policy cannot call as tools."""
        found = {"snapshot", "restore"} if self.has_snapshots else set()
        return found | ({"begin_action"} if self._begin else set())

    def describe(self) -> Fields:
        """Return which optional methods the environment supports, as fields of the answer to `open`."""
        return {
            "has_snapshots": self.has_snapshots,
            "can_replay": getattr(self._own, "can_replay", True) is not False,
            "begins_actions": self._begin is not None,
        }

    def begin_action(self, key: str) -> Any:
        """Return the result of an action if it was done before, or None if the action must be done now."""
        return self._finish(self._begin(key)) if self._begin and key else None

    def take_snapshot(self) -> Fields:
        """Return the state of the environment, in Base64."""
        data = self._finish(self._own.snapshot())
        if not isinstance(data, bytes):
            return {"error": f"snapshot returned a {type(data).__name__}, not bytes"}
        if len(data) > LARGEST_SNAPSHOT:
            return {"error": f"the snapshot has {len(data)} bytes, and at most {LARGEST_SNAPSHOT} can be stored"}
        return {"data": base64.b64encode(data).decode()}

    def restore(self, data: str) -> Fields:
        """Restore the state that the environment had when a snapshot was taken."""
        self._finish(self._own.restore(base64.b64decode(data)))
        return {}


def returns_bytes(method: Any) -> bool:
    """Return whether a method is annotated to return bytes."""
    return callable(method) and inspect.signature(method).return_annotation in (bytes, "bytes")


def find_begin(own: Any) -> Callable[[str], Any] | None:
    """Return the method `begin_action` if its only argument is `action_key`; otherwise it is an ordinary tool."""
    found: Any = getattr(own, "begin_action", None)
    return found if callable(found) and list(inspect.signature(found).parameters) == ["action_key"] else None
