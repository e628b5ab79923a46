"""Kuhn poker in self-play: the policy plays both players, each as a role with a context of its own.

    first    card --> its action --> action of `second` --> its action
    second   card and first action --> its action

A role reads only its own card and the actions, one letter each. The reward of a role is what it wins, so the two
rewards are opposite. An illegal action loses the largest stake.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollflow.storage.records import Outcome
from rollflow.tasks.environments.base import Environment, Episode, LogProbs
from rollflow.tasks.environments.ports import EnvironmentPorts, Tokenizer
from rollflow.tasks.games.kuhn_poker import (
    ACTIONS,
    ROLES,
    STAKE,
    STATES,
    find_exploitability,
    find_seat,
    find_value,
    settle,
)
from rollflow.tasks.scorers.base import Score


class KuhnPoker(Environment):
    """The environment of Kuhn poker, in which an episode is one hand with the cards of the prompt."""

    async def play(self, episode: Episode) -> Score | None:
        """Play a hand. The outcome is "correct" if all actions are legal, no matter which player wins."""
        deal, history = episode.prompt.reference["deal"], ""
        while (won := settle(deal, history)) is None:
            seat = find_seat(history)
            if not _tell_role(episode, seat, deal[seat] + history):
                return Score(0.0, "out of tokens", Outcome.WRONG)
            made = await episode.generate(max_tokens=1)
            if made is None:
                return None
            action = episode.ports.tokenizer.decode_response(made.tokens)
            if action not in ACTIONS:
                return _score_hand(STAKE if seat else -STAKE, f"unparsable action {action!r}", Outcome.UNPARSABLE)
            history += action
        return _score_hand(won, history, Outcome.CORRECT)

    async def measure(self, logprobs: LogProbs, ports: EnvironmentPorts) -> Mapping[str, float]:
        """Return the exploitability of the policy, and the value of the game for the first player in self-play, both
        exact. The probabilities of the two legal actions are scaled to the sum 1."""
        strategy = dict[str, float]()
        for state in STATES:
            context = _encode(ports.tokenizer, state)
            found = [await logprobs([*context, *_encode(ports.tokenizer, action)]) for action in ACTIONS]
            if None in found:
                return {}
            passed, bet = (one[-1] for one in found if one is not None)
            strategy[state] = (1 + math.tanh((bet - passed) / 2)) / 2  # logistic function that cannot overflow
        return {"exploitability": find_exploitability(strategy), "self_play_value": find_value(strategy)}


def _tell_role(episode: Episode, seat: int, state: str) -> bool:
    """Let a player (role) act after the other player's newest action; return False if there is no room for an
    action."""
    tokenizer = episode.ports.tokenizer
    episode.take_role(ROLES[seat])
    if len(state) <= 1 + seat:  # the first turn of the role
        episode.replace_prompt(_encode(tokenizer, state))
    else:
        told = _encode(tokenizer, state[-1])
        if len(told) >= episode.room:
            return False
        episode.add(told)
    episode.enter_state(state)
    return True


def _encode(tokenizer: Tokenizer, text: str) -> Sequence[int]:
    """Return the tokens of a text, letter by letter, because the policy samples each action as a separate token."""
    return [token for letter in text for token in tokenizer.encode_response(letter)]


def _score_hand(won: int, reason: str, outcome: Outcome) -> Score:
    """Return the score of a hand in which the first player won `won` chips."""
    first, second = ROLES
    return Score(float(won), reason, outcome, roles={first: float(won), second: -float(won)})
