"""Computes the width of tickets (requests for slots of an engine) in the slot queue."""

from __future__ import annotations

from benchmarks.baselines import GroupTicket
from rollflow.tasks.rollout.slots import Ticket


def width(ticket: Ticket) -> int:
    """Return the number of slots that a ticket is for."""
    return ticket.width if isinstance(ticket, GroupTicket) else 1
