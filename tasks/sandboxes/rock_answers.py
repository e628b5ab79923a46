"""Reads the answers of servers of ROCK's protocol, and of rocklets (the agents inside ROCK's sandboxes)."""

from __future__ import annotations

from collections.abc import Mapping

import httpx

from rollflow.tasks.sandboxes.base import SandboxFailed
from rollflow.tasks.sandboxes.rock_session import Answer, RequestFailed
from rollflow.tasks.sandboxes.run_code import shorten

ROCKLET_ERROR, TIMED_OUT = 511, 504  # HTTP status for an exception in a rocklet, and for a command that took too long


def read_result(answer: httpx.Response) -> Answer:
    """Return the result in a ROCK server's answer, a JSON object with a status and a result.

    Raises:
        RequestFailed: the answer has the status "Failed".
        SandboxFailed: the answer does not have ROCK's format, or reports an error of the server.
    """
    found = _read_object(answer)
    result = found.get("result")
    result = result if isinstance(result, Mapping) else {}
    if answer.status_code != 200 or found.get("status") not in ("Success", "Failed"):
        raise SandboxFailed(f"the server gave no valid answer (status {answer.status_code}): {shorten(answer.text)}")
    if found["status"] == "Success":
        return result
    reason = shorten(str(found.get("error") or found.get("message") or ""))
    if result.get("code") == 5000:
        raise SandboxFailed(f"the server reported an error of its own: {reason}")
    raise RequestFailed(reason, result)


def read_rocklet_result(answer: httpx.Response) -> Answer:
    """Return the result in a rocklet's answer: the JSON object itself.

    Raises:
        RequestFailed: the rocklet raised an exception.
        SandboxFailed: the answer does not have the format of a rocklet's answer.
    """
    found = _read_object(answer)
    if answer.status_code == ROCKLET_ERROR:
        raised = found.get("rockletexception")
        raise RequestFailed(shorten(str(raised.get("message") if isinstance(raised, Mapping) else raised)), {})
    if answer.status_code == TIMED_OUT:
        raise RequestFailed("the command took longer than its time limit", {})
    if answer.status_code != 200:
        raise SandboxFailed(
            f"the rocklet (server of one sandbox) answered with status {answer.status_code}: {shorten(answer.text)}"
        )
    return found


def _read_object(answer: httpx.Response) -> Answer:
    try:
        found = answer.json()
    except ValueError:
        found = None
    return found if isinstance(found, Mapping) else {}
