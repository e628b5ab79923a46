"""What a ticket of the slot queue is for."""

from __future__ import annotations

from rollflow.tasks.rollout.baselines import GroupTicket
from rollflow.tasks.rollout.slots import Ticket


def width(ticket: Ticket) -> int:
    """Slots that it is for."""
    return ticket.width if isinstance(ticket, GroupTicket) else 1
