"""Generates deals of Kuhn poker as prompts.

Each block of six positions has all six deals, in an order that follows from the run's seed. The text of a prompt is
only the number of the hand, because no player may read the deal. Held-out hands have the same six deals as training
hands, so an evaluation measures how well the policy plays.

A demonstration is one player's part of a hand in which both players act at random.
"""

from __future__ import annotations

import random

from rollflow.tasks.games.kuhn_poker import ACTIONS, DEALS, settle
from rollflow.tasks.prompts.base import DemonstratedTurn, Question
from rollflow.tasks.prompts.held_out import HeldOut


class DealSource:
    """A `QuestionSource` of deals of Kuhn poker."""

    def __init__(self, seed: int, count: int, excluded: HeldOut) -> None:
        self._seed = seed
        self._held = [self._ask_hand("held-out hand", position) for position in range(count)]
        for question in self._held:
            excluded.add(question)

    def training(self, position: int) -> Question:
        """Return the hand at `position` of the training hands."""
        return self._ask_hand("hand", position)

    def demonstration(self, position: int) -> Question:
        """Return one player's part of a hand at random."""
        draw = random.Random(f"{self._seed}:demonstration:{position}")
        deal, history = draw.choice(DEALS), ""
        while settle(deal, history) is None:
            history += draw.choice(ACTIONS)
        return build_demonstration(deal, history, draw.randrange(2))

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out hands."""
        return self._held[:count]

    def _ask_hand(self, stream: str, position: int) -> Question:
        draw, place = random.Random(f"{self._seed}:{stream}:{position // len(DEALS)}"), position % len(DEALS)
        deal = draw.sample(DEALS, len(DEALS))[place]
        return Question(f"{stream} {position}", deal, {"answer": deal, "deal": deal})


def build_demonstration(deal: str, history: str, seat: int) -> Question:
    """Build the question of one player's part of a hand, with the player's texts as demonstrated turns."""
    opening, turns = deal[seat] + history[:seat], list[DemonstratedTurn]()
    for at in range(seat, len(history), 2):
        told = history[at + 1 : at + 2] if at + 2 < len(history) else ""
        turns.append(DemonstratedTurn(history[at], ({"role": "user", "content": told},) if told else ()))
    return Question(opening, history[seat], {"answer": history[seat], "deal": deal}, turns=tuple(turns))
