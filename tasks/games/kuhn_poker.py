"""Defines the rules of Kuhn poker, and computes exactly how far a policy is from an equilibrium.

Two players put one chip each into the pot, and each gets one of three different cards. The players act in turn, with a
pass or a bet of one chip. A hand ends with one of these histories (p: pass, b: bet):

    pp         the higher card wins 1 chip
    bp, pbp    the bet was not called: the player who bet wins 1 chip
    bb, pbb    the bet was called: the higher card wins 2 chips

A state is what the acting player knows: the player's own card and the history, for example `Qpb`. A strategy is the
probability of a bet in each state.

In each equilibrium (Kuhn 1950), the first player loses 1/18 chip per hand. The exploitability of a strategy is what a
player who knows the strategy wins against it per hand, averaged over both seats.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations, product

CARDS = "JQK"  # in ascending order
ACTIONS = PASS, BET = "p", "b"
ROLES = "first", "second"
DEALS = tuple(map("".join, permutations(CARDS, 2)))  # the card of the first player, then the card of the second player
STATES = tuple(card + history for history in ("", "p", "b", "pb") for card in CARDS)
STAKE = 2  # number of chips that a player can lose in a hand

Strategy = Mapping[str, float]  # state -> probability of a bet


def find_seat(history: str) -> int:
    """Return which player acts after a history: 0 for the first player, 1 for the second player."""
    return len(history) % 2


def settle(deal: str, history: str) -> int | None:
    """Return the number of chips that the first player wins; None if the hand has not ended."""
    if history in ("pp", "bb", "pbb"):
        stake = 1 if history == "pp" else STAKE
        return stake if CARDS.index(deal[0]) > CARDS.index(deal[1]) else -stake
    return {"bp": 1, "pbp": -1}.get(history)


def find_value(strategy: Strategy) -> float:
    """Return the mean number of chips that the first player wins if both players use the strategy."""
    return sum(_expect(deal, strategy) for deal in DEALS) / len(DEALS)


def find_best_response(strategy: Strategy, seat: int) -> float:
    """Return the largest mean number of chips that the player at `seat` can win if the other player uses the
    strategy.

    All plans are tried, separately for each card. A plan says in which states the player bets.
    """
    sign, won = 1 - 2 * seat, 0.0
    for card in CARDS:
        own = [state for state in STATES if state[0] == card and find_seat(state[1:]) == seat]
        deals = [deal for deal in DEALS if deal[seat] == card]
        plans = (dict(zip(own, plan, strict=True)) for plan in product((0.0, 1.0), repeat=len(own)))
        # The other player has another card, so the plan changes none of the other player's states.
        won += max(sum(sign * _expect(deal, {**strategy, **plan}) for deal in deals) for plan in plans)
    return won / len(DEALS)


def find_exploitability(strategy: Strategy) -> float:
    """Return how many chips per hand a best response wins against the strategy, averaged over both players."""
    return (find_best_response(strategy, 0) + find_best_response(strategy, 1)) / 2


def _expect(deal: str, strategy: Strategy, history: str = "") -> float:
    """Return the mean number of chips that the first player wins after a history."""
    if (won := settle(deal, history)) is not None:
        return float(won)
    bet = strategy[deal[find_seat(history)] + history]
    passed, made = (_expect(deal, strategy, history + action) for action in ACTIONS)
    return (1 - bet) * passed + bet * made
