"""Tests Kuhn poker: its rules, the exact exploitability of a policy, and the environment in which a policy plays
against itself.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.flows.config import parse_config
from rollflow.flows.prepare import prepare
from rollflow.storage.errors import ConfigError
from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import Outcome, Prompt, StopReason, Trajectory
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments.config import KuhnPokerEnvironment
from rollflow.tasks.environments.kuhn_poker import KuhnPoker
from rollflow.tasks.games.kuhn_poker import (
    DEALS,
    STATES,
    Strategy,
    find_best_response,
    find_exploitability,
    find_value,
    settle,
)
from rollflow.tasks.prompts.games.deals import DealSource, build_demonstration
from rollflow.tasks.prompts.held_out import HeldOut
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run import held_out_episodes
from rollflow.tasks.run.held_out_accuracy import HeldOutJudge
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.testing.environments import build_ports

HANDS = {"pp": "showdown", "bp": "fold", "bb": "showdown", "pbp": "fold", "pbb": "showdown"}
PROBABILITIES = st.floats(0, 1)
STRATEGIES = st.fixed_dictionaries(dict.fromkeys(STATES, PROBABILITIES))
UNIFORM = dict.fromkeys(STATES, 0.5)


def equilibrium(alpha: float) -> Strategy:
    """Return the equilibrium in which the first player bets with the jack with probability `alpha` (Kuhn 1950)."""
    first = {"J": alpha, "Q": 0.0, "K": 3 * alpha, "Jpb": 0.0, "Qpb": alpha + 1 / 3, "Kpb": 1.0}
    return first | {"Jp": 1 / 3, "Qp": 0.0, "Kp": 1.0, "Jb": 0.0, "Qb": 1 / 3, "Kb": 1.0}


def win(deal: str, hand: str) -> int:
    """Return the number of chips that the first player wins, computed from what each player has put into the pot."""
    paid = [1 + sum(action == "b" for action in hand[seat::2]) for seat in (0, 1)]
    folded = HANDS[hand] == "fold"
    won = (len(hand) % 2 == 0) if folded else "JQK".index(deal[0]) > "JQK".index(deal[1])
    return paid[1] if won else -paid[0]


def value_by_oracle(strategy: Strategy) -> float:
    """Return the first player's expected chips: the sum of probability times chips over all deals and hands."""
    total = 0.0
    for deal, hand in product(DEALS, HANDS):
        weight = 1.0
        for at, action in enumerate(hand):
            bet = strategy[deal[at % 2] + hand[:at]]
            weight *= bet if action == "b" else 1 - bet
        total += weight * win(deal, hand) / 6
    return total


def best_by_oracle(strategy: Strategy, seat: int) -> float:
    """Return a player's expected chips with the best of all 64 deterministic strategies."""
    own = [state for state in STATES if len(state) % 2 == 1 - seat]
    plans = (dict(zip(own, plan, strict=True)) for plan in product((0.0, 1.0), repeat=6))
    return max((1 - 2 * seat) * value_by_oracle({**strategy, **plan}) for plan in plans)


@pytest.mark.parametrize("hand", HANDS)
def test_chips_won_agree_with_a_second_implementation(hand: str) -> None:
    for deal in DEALS:
        assert settle(deal, hand) == win(deal, hand)
        assert all(settle(deal, hand[:count]) is None for count in range(len(hand)))


@given(st.floats(0, 1 / 3))
def test_equilibrium_has_the_known_value_and_cannot_be_exploited(alpha: float) -> None:
    assert find_value(equilibrium(alpha)) == pytest.approx(-1 / 18, abs=1e-12)
    assert find_best_response(equilibrium(alpha), 0) == pytest.approx(-1 / 18, abs=1e-12)
    assert find_exploitability(equilibrium(alpha)) == pytest.approx(0, abs=1e-12)


def test_strategy_outside_the_equilibria_can_be_exploited() -> None:
    """If the first player bets with the jack more than a third of the time, the second player gains by calling with the
    queen.
    """
    assert find_exploitability({**equilibrium(1 / 3), "J": 0.5}) > 0.01


def test_exploitability_of_random_play_matches_hand_calculation() -> None:
    """Against random play, the first player's best response bets with any card: J -1/2, Q 1/2, K 3/2 chips, so 1/2 in
    the mean.

    After a pass, the second player's best response bets with any card: J -1/2, Q 1/2, K 3/2. After a bet, it folds with
    J (-1) and calls with Q (0) and K (2). A pass and a bet are equally likely, so the means are J -3/4, Q 1/4, K 7/4,
    and 5/12 over all cards.
    """
    assert find_value(UNIFORM) == pytest.approx(1 / 8)
    assert find_best_response(UNIFORM, 0) == pytest.approx(1 / 2)
    assert find_best_response(UNIFORM, 1) == pytest.approx(5 / 12)
    assert find_exploitability(UNIFORM) == pytest.approx(11 / 24)


@given(STRATEGIES)
def test_best_response_is_the_best_of_all_strategies(strategy: Strategy) -> None:
    assert find_value(strategy) == pytest.approx(value_by_oracle(strategy), abs=1e-12)
    for seat in (0, 1):
        assert find_best_response(strategy, seat) == pytest.approx(best_by_oracle(strategy, seat), abs=1e-12)
    assert find_exploitability(strategy) >= -1e-12


# --- the environment -----------------------------------------------------------------------------------------

PORTS = build_ports(KuhnPokerEnvironment())


def play(deal: str, said: Sequence[str], longest: int = 3) -> tuple[Score | None, tuple[Trajectory, ...], list[str]]:
    """Play a hand with scripted letters; return the score, the trajectories, and what the policy read in each turn."""
    read = list[str]()

    async def ask(turn: Turn) -> VersionedGeneration:
        assert turn.max_new_tokens == 1
        read.append("".join(map(chr, turn.prompt.flat)))
        made = TokenSpan.of([ord(said[turn.number])], [-1.0], [4])
        return VersionedGeneration(Generation("", made, StopReason.LENGTH), 4)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def score(_: ScoreRequest) -> Score:
        raise AssertionError("a hand is scored by its rules")

    async def run() -> tuple[Score | None, tuple[Trajectory, ...]]:
        prompt = Prompt("p", 0, "kuhn-poker", "hand 0", ModelInput.of(map(ord, "hand 0")), {"deal": deal})
        episode = PlayedEpisode(prompt, longest, ask, keep, score, ports=PORTS)
        found = await episode.play(KuhnPoker())
        return found, () if found is None else episode.trajectories(found, 1, 8)

    return *asyncio.run(run()), read


def test_each_role_reads_its_own_card_and_the_actions() -> None:
    score, (first, second), read = play("JK", "pbb")
    assert read == ["J", "Kp", "Jpb"]
    assert (first.role, second.role) == ("first", "second")
    assert ("".join(map(chr, first.tokens)), "".join(map(chr, second.tokens))) == ("Jpbb", "Kpb")
    assert [*map(bool, first.loss_mask)] == [False, True, False, True]
    assert [*map(bool, second.loss_mask)] == [False, False, True]
    assert (first.reward, second.reward) == (-2.0, 2.0)
    assert (first.sample, second.sample, first.branch, second.branch) == (1, 9, None, (1, 0))
    assert (first.turn_starts, second.turn_starts) == ((1, 3), (2,))
    assert score is not None
    assert (score.value, score.reason, score.outcome) == (-2.0, "pbb", Outcome.CORRECT)


@pytest.mark.parametrize("hand", HANDS)
@pytest.mark.parametrize("deal", DEALS)
def test_rewards_of_the_roles_are_opposite(deal: str, hand: str) -> None:
    _, (first, second), read = play(deal, hand)
    assert (first.reward, second.reward) == (win(deal, hand), -win(deal, hand))
    assert len(read) == len(hand)


@pytest.mark.parametrize(
    ("said", "rewards"), [("x", [-2.0]), ("px", [2.0, -2.0]), ("pbB", [-2.0, 2.0]), ("\n", [-2.0]), ("b2", [2.0, -2.0])]
)
def test_letter_that_is_not_a_valid_action_loses_the_stake(said: str, rewards: list[float]) -> None:
    score, made, _ = play("KJ", said)
    assert [one.reward for one in made] == rewards
    assert score is not None
    assert (score.outcome, score.reason) == (Outcome.UNPARSABLE, f"unparsable action {said[-1]!r}")


def test_hand_without_room_for_an_action_ends() -> None:
    score, made, _ = play("KJ", "pb", longest=2)
    assert score is not None
    assert (score.reason, score.outcome, [one.reward for one in made]) == ("out of tokens", Outcome.WRONG, [0.0, 0.0])


@given(STRATEGIES)
def test_exploitability_is_measured_by_the_policys_log_probs(strategy: Strategy) -> None:
    """Half of the policy's probability is on letters that are not actions."""
    strategy = {state: min(max(bet, 1e-6), 1 - 1e-6) for state, bet in strategy.items()}

    async def logprobs(tokens: Sequence[int]) -> Sequence[float]:
        *read, action = map(chr, tokens)
        bet = strategy["".join(read)]
        return [-9.0] * (len(read) - 1) + [math.log((bet if action == "b" else 1 - bet) / 2)]

    found = asyncio.run(KuhnPoker().measure(logprobs, PORTS))
    assert found["exploitability"] == pytest.approx(find_exploitability(strategy), abs=1e-9)
    assert found["self_play_value"] == pytest.approx(find_value(strategy), abs=1e-9)


def test_exploitability_is_not_measured_without_log_probs() -> None:
    async def nothing(_: Sequence[int]) -> None:
        return None

    async def certain(tokens: Sequence[int]) -> Sequence[float]:
        return [0.0 if tokens[-1] == ord("b") else -1e30]

    assert asyncio.run(KuhnPoker().measure(nothing, PORTS)) == {}
    always = asyncio.run(KuhnPoker().measure(certain, PORTS))
    assert always["exploitability"] == find_exploitability(dict.fromkeys(STATES, 1.0))


# --- prompts -------------------------------------------------------------------------------------------------


def test_every_six_hands_contain_each_deal_once() -> None:
    source = DealSource(3, 12, HeldOut())
    for ask in (source.training, source.held_out(12).__getitem__):
        deals = [ask(position).reference["deal"] for position in range(12)]
        assert sorted(deals[:6]) == sorted(deals[6:]) == sorted(DEALS)
    assert not any(set("JQK") & set(source.training(position).text) for position in range(12))


@pytest.mark.parametrize("hand", HANDS)
def test_demonstration_has_the_same_tokens_as_a_played_hand(hand: str) -> None:
    _, made, read = play("QJ", hand)
    for seat, one in enumerate(made):
        question = build_demonstration("QJ", hand, seat)
        said = "".join(turn.said + "".join(reply["content"] for reply in turn.replies) for turn in question.turns)
        assert question.text == read[seat]
        assert question.text + said == "".join(map(chr, one.tokens))
        assert "".join(turn.said for turn in question.turns) == hand[seat::2]


def test_demonstrations_cover_all_decisions_of_both_players() -> None:
    source, seen = DealSource(0, 6, HeldOut()), set[str]()
    for position in range(200):
        question = source.demonstration(position)
        context = question.text
        for turn in question.turns:
            seen.add(context)
            context += turn.said + "".join(reply["content"] for reply in turn.replies)
    assert seen == set(STATES)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"prompts": [{"kind": "kuhn-poker"}]}, r'prompts\.0\.kind.*set environment\.kind = "kuhn-poker"'),
        ({"environment": {"kind": "kuhn-poker"}, "prompts": [{"kind": "sorting"}]}, r"environment\.kind.*its game"),
        ({"prompts": [{"kind": "kuhn-poker", "chat": True}]}, r"prompts\.0\.chat.*remove the key"),
        ({"prompts": [{"kind": "kuhn-poker", "template": "a {question}"}]}, r"prompts\.0\.template.*remove the key"),
    ],
)
def test_kuhn_poker_with_incompatible_keys_is_refused(tree: dict[str, Any], words: str) -> None:
    game = {} if "kind" in words else {"environment": {"kind": "kuhn-poker"}}
    with pytest.raises(ConfigError, match=words):
        parse_config({**game, **tree})


def test_run_of_kuhn_poker_can_be_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks before a run pass, the prompts are recorded, and the accuracy of a new policy is measured by playing
    hands.
    """
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    tree = {
        "prompts": [{"kind": "kuhn-poker"}],
        "environment": {"kind": "kuhn-poker"},
        "engine": {"kind": "timed", "max_new_tokens": 3},
        "evaluation": {"prompts": 12},
        "policy": {"cold_start": {"vocabulary": 258, "hidden_size": 32, "heads": 2, "layers": 1}},
    }
    context = prepare(parse_config(tree), "hands")
    assert [pin["kind"] for pin in context.created.prompts] == ["kuhn-poker"]

    def generate(_: Any, prompts: Sequence[Sequence[int]], *__: Any) -> list[list[int]]:
        return [list(context.tokenizer.encode_response("p")) for _ in prompts]

    monkeypatch.setattr(held_out_episodes, "generate_answers", generate)
    with HeldOutJudge(context) as measure:
        assert measure(None).mean == 1.0
