"""Advantages of turns: by hand, and for random episodes against the papers' formulas.

The oracle uses plain Python floats, one turn at a time. An episode has one row or several branches; a row is the reward
of the trajectory and its turns; a turn is the state in which it acted and the rewards of its tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import chain
from statistics import fmean, stdev
from typing import NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import UNNAMED_STATE, Branch, StopReason, Trajectory
from rollflow.storage.token_arrays import Float32s, Int64s
from rollflow.tasks.learners.forward.pre_update import compute_targets
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.advantages import EPSILON, TINY
from rollflow.tasks.objectives.config import PartsObjective
from rollflow.tasks.objectives.rows import BatchRows
from rollflow.tasks.objectives.token_rewards import check_states
from rollflow.tasks.objectives.turn_advantages import find_turns
from rollflow.testing.learners import batch_of


class Turn(NamedTuple):
    """A turn of the policy: its state, and the reward of each of its tokens; None is a token without a reward."""

    state: int
    rewards: list[float | None]


class Row(NamedTuple):
    """A trajectory: the reward of the episode, and the turns."""

    reward: float
    turns: list[Turn]


Episode = list[Row]
Group = list[Episode]
NUMBER = st.integers(-8, 8).map(lambda quarters: quarters / 4)
TURNS = st.builds(
    Turn, st.sampled_from([UNNAMED_STATE, 5, -6, 1 << 62]), st.lists(st.none() | NUMBER, min_size=1, max_size=3)
)
ROWS = st.builds(Row, NUMBER, st.lists(TURNS, max_size=3))
EPISODES = st.lists(ROWS, min_size=1, max_size=2)
GROUPS = st.lists(st.lists(EPISODES, min_size=1, max_size=4), min_size=1, max_size=3)


def build_row(sample: int, row: Row, branch: Branch | None) -> Trajectory:
    """Build a trajectory: a prompt of two tokens, then turns, each followed by a token of the environment."""
    mask, rewards, starts = [False, False], [math.nan] * 2, list[int]()
    for turn in row.turns:
        starts.append(len(mask))
        mask += [True] * len(turn.rewards) + [False]
        rewards += [math.nan if value is None else value for value in turn.rewards] + [math.nan]
    given = None if all(map(math.isnan, rewards)) else Float32s.of(rewards)
    tokens, versions = (5,) * len(mask), tuple(0 if one else -1 for one in mask)
    made = Trajectory(sample, 0, tokens, mask, (0.0,) * len(mask), versions, row.reward, "", StopReason.STOP)
    states = Int64s.of([turn.state for turn in row.turns]) if any(turn.state for turn in row.turns) else None
    return replace(made, token_rewards=given, turn_starts=tuple(starts), turn_states=states, branch=branch)


def data_of(groups: list[Group]) -> BatchRows:
    made = []
    for group in groups:
        rows = list[Trajectory]()
        for episode in group:
            for number, row in enumerate(episode):
                rows.append(build_row(len(rows), row, Branch(len(rows) - 1, 2) if number else None))
        made.append(rows)
    return BatchRows.of(batch_of(*made))


def found_by(part: Advantage, groups: list[Group]) -> list[float]:
    """Return the advantages of all tokens, in the order of the batch."""
    data = data_of(groups)
    return compute_targets(part, replace(data, rewards=data.rewards.astype(float)), 10).advantage_B.tolist()


def one(*turns: tuple[int, float], reward: float = 0.0) -> Episode:
    """Return an episode of turns of one token each, given by their state and reward."""
    return [Row(reward, [Turn(state, [value]) for state, value in turns])]


def part_of(**keys: object) -> Advantage:
    return Advantage.model_validate(keys)


# --- by hand -------------------------------------------------------------------------------------------------------


def test_turn_return_is_the_discounted_sum_of_later_rewards() -> None:
    """Rewards 1, 0 and 2, and 4 for the episode: the returns are 6, 6 / 2 and 1 + 3 / 2."""
    part = part_of(credit="turn", gamma=0.5, baseline="none", scale="none")
    episode = [Row(4.0, [Turn(0, [None, 1.0]), Turn(0, [None, None]), Turn(0, [1.5, 0.5])])]
    assert found_by(part, [[episode]]) == [2.5, 2.5, 3.0, 3.0, 6.0, 6.0]


def test_turns_are_compared_with_turns_of_the_same_number() -> None:
    """Returns 3, 2 and 1, 0 and 5, 5, 5: the means are 3 and 7/3, and the third turn is alone."""
    part = part_of(credit="turn", scale="none")
    group = [one((0, 1.0), (0, 2.0)), one((0, 1.0), (0, 0.0)), one((0, 0.0), (0, 0.0), (0, 5.0))]
    assert found_by(part, [group]) == pytest.approx([0, 2 - 7 / 3, -2, -7 / 3, 2, 5 - 7 / 3, 0], abs=1e-12)


def test_leave_one_out_compares_a_turn_with_the_other_turns() -> None:
    part = part_of(credit="turn", baseline="leave-one-out", scale="none")
    found = found_by(part, [[one((0, 3.0)), one((0, 1.0)), one((0, 0.0))]])
    assert found == pytest.approx([2.5, -0.5, -2.0], abs=1e-12)


def test_gigpo_matches_a_hand_calculation() -> None:
    """Episodes with the rewards 1 and 0: (1 - 1/2) / sqrt(1/2). In state 7 act the first turns and the second turn of
    the second episode, with the returns 1/2, 0 and 0; in state 8 acts one turn."""
    part = part_of(credit="state", gamma=0.5, state_weight=2.0)
    episodes = 0.5 / (math.sqrt(0.5) + EPSILON)
    deviation = math.sqrt((1 / 9 + 2 / 36) / 2) + EPSILON
    expected = [
        episodes + 2 / 3 / deviation,
        episodes,
        -episodes - 2 / 6 / deviation,
        -episodes - 2 / 6 / deviation,
    ]
    group = [one((7, 0.0), (8, 0.0), reward=1.0), one((7, 0.0), (7, 0.0))]
    assert found_by(part, [group]) == pytest.approx(expected, abs=1e-12)


def test_gigpo_without_deviation_matches_a_hand_calculation() -> None:
    """F_norm = 1: the episodes differ from their mean by 1/2, the turns in state 7 by 1/2, those in state 8 by 1."""
    part = part_of(credit="state", scale="none")
    group = [one((7, 0.0), (8, 1.0)), one((7, 1.0), (8, -1.0))]
    assert found_by(part, [group]) == [0.5 + 0.5, 0.5 + 1.0, -0.5 - 0.5, -0.5 - 1.0]


def test_states_of_other_groups_are_not_compared() -> None:
    part = part_of(credit="state", scale="none")
    assert found_by(part, [[one((7, 1.0))], [one((7, 0.0))]]) == [0.0, 0.0]


def test_turns_without_a_state_get_the_episode_advantage() -> None:
    group = [one((UNNAMED_STATE, 0.0), (UNNAMED_STATE, 0.0), reward=1.0), one((UNNAMED_STATE, 0.0))]
    found = found_by(part_of(credit="state"), [group])
    up = 0.5 / (math.sqrt(0.5) + EPSILON)
    assert found == pytest.approx([up, up, -up], abs=1e-12)


def test_penalty_of_one_turn_does_not_change_later_turns() -> None:
    """A format penalty for the second turn does not change the credit of later turns."""
    part = part_of(credit="turn", scale="none")
    group = [one((0, 0.0), (0, -0.5), (0, 0.0), reward=1.0), one((0, 0.0), (0, 0.0), (0, 0.0), reward=1.0)]
    assert found_by(part, [group]) == [-0.25, -0.25, 0.0, 0.25, 0.25, 0.0]


def test_row_without_recorded_turns_counts_as_one_turn() -> None:
    data = data_of([[one((7, 1.0), (8, 2.0)), one((9, 4.0))]])
    bare = replace(data, turn_starts=None, turn_states=None)
    assert find_turns(bare).of_tokens.tolist() == [0, 0, 1]
    half = replace(data, turn_starts=data.turn_starts[2:], turn_states=data.turn_states[2:])  # type: ignore[index]
    turns = find_turns(half)
    assert (turns.of_tokens.tolist(), turns.states.tolist()) == ([0, 0, 1], [UNNAMED_STATE, 9])


# --- against the formulas -------------------------------------------------------------------------------------------


def returns_of(episode: Episode, gamma: float) -> list[float]:
    """Return the return of each turn of an episode with turns, written as the sum over the later turns."""
    rewards = [sum(value or 0.0 for value in turn.rewards) for row in episode for turn in row.turns]
    rewards[-1] += episode[-1].reward
    return [sum(gamma ** (later - k) * rewards[later] for later in range(k, len(rewards))) for k in range(len(rewards))]


def normalise(part: Advantage, value: float, place: int, values: list[float]) -> float:
    """Compare a value, the one at `place` of `values`, with all of them."""
    others = values[:place] + values[place + 1 :]
    base = fmean(others or [value]) if part.baseline == "leave-one-out" else fmean(values)
    divisor = stdev(values) + EPSILON if part.scale == "group" and others else 1.0
    return (value - base) / divisor


def expected_of(part: Advantage, groups: list[Group]) -> list[float]:
    """Return the advantage of each token, before the baseline and the scales of the batch."""
    found = []
    for group in groups:
        returns = [returns_of(episode, part.gamma) if any(row.turns for row in episode) else [] for episode in group]
        states = [[turn.state for row in episode for turn in row.turns] for episode in group]
        totals = [sum(returns_of(e, 1.0)[:1]) if any(row.turns for row in e) else e[-1].reward for e in group]
        for number, episode in enumerate(group):
            sizes = [len(turn.rewards) for row in episode for turn in row.turns]
            for k, size in enumerate(sizes):
                advantage = returns[number][k]
                if part.baseline in ("group", "leave-one-out"):
                    places = [
                        (i, j)
                        for i, one in enumerate(states)
                        for j, state in enumerate(one)
                        if (j == k if part.credit == "turn" else state == states[number][k] != UNNAMED_STATE)
                    ] or [(number, k)]
                    values = [returns[i][j] for i, j in places]
                    advantage = normalise(part, advantage, places.index((number, k)), values)
                if part.credit == "state":
                    advantage = normalise(part, totals[number], number, totals) + part.state_weight * advantage
                found += [advantage] * size
    return found


def scaled_of(part: Advantage, flat: list[float]) -> list[float]:
    mean = fmean(flat) if flat and (part.baseline == "batch" or part.scale == "whiten") else 0.0
    deviation = math.sqrt(stdev(flat) ** 2 + TINY) if part.scale in ("batch", "whiten") else 1.0
    return [(value - mean) / deviation for value in flat]


SCALES = {"none": ("none", "whiten"), "batch": ("none", "batch", "whiten")}
PARTS = [
    {"credit": credit, "baseline": baseline, "scale": scale}
    for credit in ("turn", "state")
    for baseline in ("none", "batch", "group", "leave-one-out")
    if credit == "turn" or baseline not in SCALES
    for scale in SCALES.get(baseline, ("none", "group", "batch", "whiten"))
]


@pytest.mark.parametrize("keys", PARTS, ids=lambda keys: "-".join(keys.values()))
@given(groups=GROUPS, gamma=st.just(1.0) | st.floats(0.3, 1), weight=st.floats(0, 3))
@settings(max_examples=12, deadline=None)
def test_turn_advantages_equal_a_direct_formula(
    keys: dict[str, str], groups: list[Group], gamma: float, weight: float
) -> None:
    part = part_of(**keys, gamma=gamma, **({"state_weight": weight} if keys["credit"] == "state" else {}))
    flat = expected_of(part, groups)
    # the code keeps the deviation above zero
    assume(part.scale not in ("batch", "whiten") or (len(flat) > 1 and max(flat) - min(flat) > 1e-2))
    assert found_by(part, groups) == pytest.approx(scaled_of(part, flat), abs=1e-9)


# --- properties ------------------------------------------------------------------------------------------------------


COMPARING = [
    part_of(credit=credit, gamma=0.9, scale=scale) for credit in ("turn", "state") for scale in ("none", "group")
]


def split(groups: list[Group], values: list[float]) -> list[list[list[float]]]:
    """Return the values of the tokens of each episode."""
    left = iter(values)
    return [
        [[next(left) for row in episode for turn in row.turns for _ in turn.rewards] for episode in group]
        for group in groups
    ]


@pytest.mark.parametrize("part", COMPARING, ids=lambda part: f"{part.credit}-{part.scale}")
@given(groups=GROUPS, seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_order_of_groups_and_episodes_changes_no_advantage(part: Advantage, groups: list[Group], seed: int) -> None:
    draw, found = random.Random(seed), split(groups, found_by(part, groups))
    orders = [draw.sample(range(len(group)), len(group)) for group in groups]
    outer = draw.sample(range(len(groups)), len(groups))
    shuffled = [[groups[g][e] for e in orders[g]] for g in outer]
    expected = chain.from_iterable(found[g][e] for g in outer for e in orders[g])
    assert found_by(part, shuffled) == pytest.approx([*expected], abs=1e-9)


@pytest.mark.parametrize(
    "keys",
    [
        *({**keys, "gamma": 0.9} for keys in PARTS),
        *({"baseline": baseline} for baseline in ("group", "leave-one-out")),
        *({"baseline": baseline, "scale": "none"} for baseline in ("none", "batch")),
    ],
    ids=lambda keys: "-".join(map(str, keys.values())),
)
@given(groups=GROUPS)
@settings(max_examples=8, deadline=None)
def test_episode_in_branches_is_credited_like_one_row(keys: dict[str, str], groups: list[Group]) -> None:
    """The rows of an episode have the same reward, and together the turns of the episode."""
    joined = [[[Row(e[-1].reward, [turn for row in e for turn in row.turns])] for e in group] for group in groups]
    branched = [[[Row(e[-1].reward, row.turns) for row in e] for e in group] for group in groups]
    part = part_of(**keys)
    assert found_by(part, branched) == pytest.approx(found_by(part, joined), abs=1e-9)


@given(groups=GROUPS, draw=st.data())
@settings(max_examples=12, deadline=None)
def test_critic_credits_branches_like_one_row(groups: list[Group], draw: st.DataObject) -> None:
    part = part_of(baseline="critic", scale="none", gamma=0.9, gae_lambda=0.8)
    joined = [[[Row(e[-1].reward, [turn for row in e for turn in row.turns])] for e in group] for group in groups]
    branched = [[[Row(e[-1].reward, row.turns) for row in e] for e in group] for group in groups]
    count = len(data_of(groups).chosen)
    values_B = torch.tensor(draw.draw(st.lists(NUMBER, min_size=count, max_size=count)))
    found = [compute_targets(part, data_of(one), 10, values_B=values_B) for one in (joined, branched)]
    for name in ("advantage_B", "returns_B"):
        torch.testing.assert_close(*(getattr(one, name) for one in found), atol=1e-6, rtol=0)


@pytest.mark.parametrize("part", COMPARING, ids=lambda part: f"{part.credit}-{part.scale}")
@given(turns=st.lists(TURNS, min_size=1, max_size=4), reward=st.floats(-9, 9, width=32), size=st.integers(1, 5))
@settings(max_examples=12, deadline=None)
def test_equal_episodes_give_advantage_zero(part: Advantage, turns: list[Turn], reward: float, size: int) -> None:
    named = [Turn(number + 1, turn.rewards) for number, turn in enumerate(turns)]
    assert set(found_by(part, [[[Row(reward, named)]] * size])) == {0.0}


@pytest.mark.parametrize("part", COMPARING, ids=lambda part: f"{part.credit}-{part.scale}")
@given(groups=GROUPS)
@settings(max_examples=12, deadline=None)
def test_float32_rewards_give_float64_turn_advantages(part: Advantage, groups: list[Group]) -> None:
    data = data_of(groups)
    found = compute_targets(part, data, 10, dtype=torch.float32).advantage_B
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(found_by(part, groups), rel=1e-6, abs=1e-6)


@given(groups=st.lists(st.lists(NUMBER, min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=12, deadline=None)
def test_turn_credit_of_single_turns_equals_grpo(groups: list[list[float]]) -> None:
    made = [[[Row(reward, [Turn(UNNAMED_STATE, [None] * 2)])] for reward in group] for group in groups]
    plain = found_by(part_of(), made)
    for credit in ("turn", "state"):
        assert found_by(part_of(credit=credit), made) == pytest.approx(plain, abs=1e-9)


def test_kl_penalty_is_subtracted_at_its_turn() -> None:
    part, data = part_of(credit="turn", gamma=0.5, baseline="none", scale="none"), data_of([[one((0, 0.0), (0, 1.0))]])
    assert compute_targets(part, data, 10, price_B=torch.tensor([0.25, 2.0])).advantage_B.tolist() == [-0.75, -1.0]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        (
            {"credit": "turn", "baseline": "critic", "scale": "none"},
            "advantage.credit = 'turn': a critic credits every",
        ),
        (
            {"credit": "state", "baseline": "none", "scale": "none"},
            "baseline = 'none': turns in the same state are comp",
        ),
        ({"credit": "state", "baseline": "batch", "scale": "none"}, "baseline = 'batch': turns in the same state are"),
        ({"credit": "turn", "state_weight": 0.5}, 'state_weight = 0.5: this key counts only with credit = "state"'),
        ({"gamma": 0.5}, "advantage.gamma = 0.5: this key has no effect without a critic; remove it, or set baseline"),
        ({"credit": "turn", "gae_lambda": 0.5}, "advantage.gae_lambda = 0.5: this key has no effect without a critic"),
    ],
)
def test_contradictory_credit_options_are_refused(keys: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        part_of(**keys)


@pytest.mark.parametrize("level", ["geometric", "sequence"])
def test_turn_credit_with_a_response_level_ratio_is_refused(level: str) -> None:
    tree = {"kind": "grpo", "aggregation": "sequence-mean", "advantage": {"credit": "turn"}, "ratio": {"level": level}}
    with pytest.raises(
        ValueError, match=f"credit = 'turn': with ratio.level = \"{level}\" all turns of a response are"
    ):
        PartsObjective.model_validate(tree)
    PartsObjective.model_validate({"kind": "topr", "advantage": {"credit": "turn"}})


@pytest.mark.parametrize(
    ("environment", "objective", "why"),
    [
        (
            {"kind": "trl", "path": "a:b"},
            {"kind": "gigpo"},
            r"credit = 'state': environment\.kind = \"trl\" names no states",
        ),
        ({"kind": "timed"}, {"kind": "gigpo"}, r"credit = 'state': environment\.kind = \"timed\" names no states"),
        (
            {"kind": "gymnasium", "id": "a", "rewards": "turns"},
            {"kind": "gspo"},
            r"environment\.rewards = 'turns': .*ratio\.level = \"token\"",
        ),
        (
            {"kind": "import", "path": "a:b", "unparsable_penalty": 0.5},
            {"kind": "gspo"},
            r"environment\.unparsable_penalty = 0\.5: .*ratio\.level = \"token\"",
        ),
    ],
)
def test_objective_that_does_not_fit_the_environment_is_refused(
    environment: dict[str, object], objective: dict[str, object], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config({"environment": environment, "train": {"objective": objective}})
    parse_config({"environment": environment, "train": {"objective": {"kind": "grpo"}}})


def test_credit_by_state_without_state_names_is_refused() -> None:
    objective = PartsObjective.model_validate({"advantage": {"credit": "state"}})
    check_states(objective, has_states=True)
    with pytest.raises(ConfigError, match=r"advantage.credit = \"state\" needs an environment that names the state"):
        check_states(objective, has_states=False)
