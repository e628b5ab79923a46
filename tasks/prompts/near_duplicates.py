"""Counts the held-out questions that have a near duplicate among the training questions, as `near_index` defines it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollflow.tasks.prompts.near_index import NEAR, N, NearIndex
from rollflow.tasks.prompts.run_prompts import RunPrompts

MOST = 10_000  # largest number of training questions to compare
SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class NearDuplicates:
    """The number of held-out questions with a near duplicate in the training questions, and how many questions were
    compared.
    """

    found: int
    held_out: int
    looked_at: int

    def sentence(self) -> str:
        """Return the number of near duplicates as one sentence for the user."""
        return (
            f"{self.found} of {self.held_out} held-out prompts have a near duplicate among "
            f"{self.looked_at:,} training prompts (at least {NEAR:.0%} of their {N}-word sequences occur in "
            "the training prompt)"
        )


def near_duplicates(prompts: RunPrompts, trained: int, seconds: float = SECONDS) -> NearDuplicates:
    """Compare the held-out questions with the first `trained` training questions, or with as many as `seconds`
    allow.
    """
    held = prompts.held_out_questions()
    index, near = NearIndex(held), set[int]()
    looked_at, deadline = 0, time.monotonic() + seconds
    for position in range(min(trained, MOST)):
        if time.monotonic() > deadline:
            break
        near.update(index.find(prompts.question(position)))
        looked_at += 1
    return NearDuplicates(len(near), len(held), looked_at)
