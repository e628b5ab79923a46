"""Tests the guarantees of an objective on each kind of objective. To test a new preset, add it to
`support/oracles.py`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import Outcome, Trajectory
from rollflow.tasks.learners.forward.pre_update import compute_targets
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.advantage_config import Advantage
from rollflow.tasks.objectives.aggregation import row_weights
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import ImportObjective, ObjectiveConfig, PartsObjective, Penalties
from rollflow.tasks.objectives.penalties import kl_estimate
from rollflow.tasks.objectives.presets import PRESETS, PresetName
from rollflow.tasks.objectives.ratios import log_ratio
from rollflow.tasks.objectives.rows import BatchRows as PackedRows
from rollflow.tasks.objectives.surrogate_config import Clip, Level
from rollflow.testing.learners import batch_of, trajectory
from rollflow.testing.objectives import ObjectiveContract, draw_tokens, gradient
from tests.support import oracles
from tests.support.dual import Dual
from tests.support.oracles import LONGEST, ORACLES, Row, Rows
from tests.support.user_code import FOLDER, put_in_reach

F64 = torch.float64


@dataclass(frozen=True)
class Case:
    """An objective, and a function that computes the loss of a whole batch by the objective's formula."""

    config: ObjectiveConfig
    oracle: Callable[[Rows], Dual]


def truncated_reinforce(rows: Rows) -> Dual:
    """Compute the loss of the example in docs/own_parts, with GRPO's advantages."""

    def loss(pi: Dual, mu: float, _: float, a: float) -> Dual:
        return -(min(math.exp(pi.value - mu), 3.0) * a * pi)

    return oracles.token_mean(oracles.by_token(rows, oracles.normalised(rows), loss))


def kept(**parts: object) -> PartsObjective:
    """Build an objective that is accepted only in recorded runs: a new run may not use the KL estimator k1 in the
    loss.
    """
    return PartsObjective.model_validate(dict(PartsObjective()) | parts)


OWN = ImportObjective(path="letters.objectives:TruncatedReinforce", options={"cap": 3.0})
CASES = {
    **{name: Case(PartsObjective(kind=name), oracle) for name, oracle in ORACLES.items()},  # type: ignore[arg-type]
    "dual-clip": Case(PartsObjective(surrogate=Clip(dual=2.0)), oracles.dual_clipped),
    "import": Case(OWN, truncated_reinforce),
    "ppo, discounted": Case(
        PartsObjective(kind="ppo", advantage=Advantage(baseline="critic", scale="whiten", gamma=0.9, gae_lambda=0.7)),
        lambda rows: oracles.ppo(rows, 0.9, 0.7),
    ),
    **{
        f"{kind} to the reference": Case(
            kept(penalties=Penalties(kl=kind, kl_to="reference", kl_weight=0.1)),
            partial(oracles.with_divergence, kind=kind, weight=0.1),
        )
        for kind in get_args(Penalties.model_fields["kl"].annotation)
    },
    "KL in the reward": Case(
        PartsObjective(penalties=Penalties(kl="k1", kl_to="reference", kl_in="reward", kl_weight=0.1)),
        lambda rows: oracles.with_priced_rewards(rows, 0.1),
    ),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    put_in_reach(monkeypatch, FOLDER)
    found: Case = request.param
    return found


class TestObjectives(ObjectiveContract):
    """The objective contract, tested on each kind of objective."""

    @pytest.fixture
    def objective(self, case: Case) -> Objective:
        return build_objective(case.config)


def test_every_objective_kind_has_a_test_case() -> None:
    kinds = ObjectiveConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(case.config) for case in CASES.values()} == set(kinds)
    assert ORACLES.keys() == PRESETS.keys()


@pytest.mark.parametrize(
    ("parts", "every"),
    [
        ({}, False),
        ({"kind": "kimi"}, True),
        ({"penalties": {"kl_weight": 0.1}}, True),
        ({"penalties": {"entropy_weight": 0.1}}, True),
        ({"penalties": {"kl_weight": 0.1, "kl_to": "reference", "kl_in": "reward"}}, False),
    ],
)
def test_rows_of_advantage_zero_are_computed_only_for_a_penalty(parts: dict[str, object], every: bool) -> None:
    assert build_objective(PartsObjective.model_validate(parts)).every_row is every


def drawn(seed: int, staleness: float) -> list[Row]:
    """Draw a batch of groups of one to five rows, some without tokens; log-ratios are about `staleness` nats."""
    draw = random.Random(seed)

    def row(group: int) -> Row:
        count = draw.choice([0, 1, 2, 5, 7, LONGEST])
        pi = [Dual(-draw.expovariate(1) - 0.01) for _ in range(count)]
        mu = [p.value + draw.gauss(0, staleness) for p in pi]
        proximal = [p.value + draw.gauss(0, staleness / 2) for p in pi]
        reward = draw.choice([0.0, 1.0, 0.3])
        values = [draw.gauss(0.5, 0.3) for _ in pi]
        reference = [p.value + draw.gauss(0, staleness + 0.1) for p in pi]
        return Row(reward, group, pi, mu, proximal, values, reference)

    return [row(group) for group, size in enumerate([1, 4, 5, 3, 2]) for _ in range(size)]


def composed(config: ObjectiveConfig, rows: list[Row]) -> tuple[float, list[float]]:
    """Compute a batch's loss and gradient with rollflow's code, as a learner does."""
    objective, counts_R = build_objective(config), torch.tensor([len(row.pi) for row in rows])
    row_M = torch.arange(len(rows)).repeat_interleave(counts_R)

    def tokens(values: Callable[[Row], Sequence[float]]) -> Tensor:
        return torch.tensor([value for row in rows for value in values(row)], dtype=F64)

    logp_M = tokens(lambda row: [p.value for p in row.pi]).requires_grad_()
    behaviour_M, proximal_M = tokens(lambda row: row.mu), tokens(lambda row: row.proximal)
    reference_M, values_M = tokens(lambda row: row.reference), tokens(lambda row: row.values)
    penalties = getattr(config, "penalties", Penalties())
    price_M = torch.zeros_like(behaviour_M)
    if penalties.kl_in == "reward":
        price_M = penalties.kl_weight * kl_estimate(penalties, behaviour_M, reference_M)
    valued = config.advantage.baseline == "critic"
    judged = compute_targets(
        config.advantage, data_of(rows), LONGEST, price_B=price_M, values_B=values_M if valued else None
    )
    kept_M = objective.keep(proximal_M, behaviour_M) if objective.uses_batch else None
    advantage_M = judged.advantage_B
    given = MaskedTokens(logp_M, behaviour_M, advantage_M, row_M, proximal_M, None, kept_M, reference_M)
    weight_M = row_weights(counts_R, config.aggregation, LONGEST)[row_M]
    loss = (objective.loss(given).loss_M * weight_M).sum()
    [found_M] = torch.autograd.grad(loss, logp_M)
    return loss.item(), found_M.tolist()


def data_of(rows: list[Row]) -> PackedRows:
    """Return the rows as a learner reads them, with rewards in float64."""
    counts = [len(row.pi) for row in rows]
    starts, empty = np.concatenate([[0], np.cumsum(counts)]), np.zeros(0)
    groups, rewards = np.array([row.group for row in rows]), np.array([row.reward for row in rows])
    return PackedRows(empty, starts, np.arange(starts[-1]), starts, empty, empty, groups, rewards)


@pytest.mark.parametrize("staleness", [0.0, 0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.soak)])
def test_loss_and_gradient_equal_the_formula(case: Case, staleness: float, seed: int) -> None:
    rows = drawn(seed, staleness)
    loss, slopes = composed(case.config, rows)
    assert loss == pytest.approx(case.oracle(rows).value, rel=1e-10, abs=1e-10)
    expected = [slope for row in oracles.gradient(case.oracle, rows) for slope in row]
    assert slopes == pytest.approx(expected, rel=1e-10, abs=1e-10)
    assert any(slopes) or case.config.kind in ("geometric-mask", "m2po")  # these presets may mask all stale rows


def stored(rows: list[Row], lost: set[int]) -> TrajectoryBatch:
    """Return the rows as a stored batch, in which the rows `lost` are left out."""
    groups: dict[int, list[Trajectory]] = {}
    for number, row in enumerate(rows):
        one = trajectory([5], [7] * len(row.pi), number, row.reward)
        if number in lost:
            one = replace(one, left_out=True, reward=math.nan, outcome=Outcome.UNJUDGED)
        groups.setdefault(row.group, []).append(one)
    return batch_of(*groups.values())


@pytest.mark.parametrize("seed", [0, 1])
def test_left_out_rows_change_no_loss_of_the_others(case: Case, seed: int) -> None:
    """The rows that a learner reads from a stored batch have the loss and the gradient of the judged rows alone."""
    rows = [replace(row, reward=0.25 if row.reward == 0.3 else row.reward) for row in drawn(seed, 0.1)]
    draw, first = random.Random(seed), [0, 1, 5, 10, 13]
    lost = {number for number in range(len(rows)) if {number, number - 1}.isdisjoint(first) and draw.random() < 0.6}
    batch = stored(rows, lost)
    assert batch.episodes - len(lost) == batch.judged.episodes < batch.episodes
    data, kept = PackedRows.of(batch.judged), [row for number, row in enumerate(rows) if number not in lost]
    read = [
        replace(kept[number], reward=float(reward), group=int(group))
        for number, (reward, group) in enumerate(zip(data.rewards, data.groups, strict=True))
    ]
    assert [len(row.pi) for row in read] == data.masked_tokens.tolist()
    loss, slopes = composed(case.config, read)
    assert loss == pytest.approx(case.oracle(kept).value, rel=1e-10, abs=1e-10)
    expected = [slope for row in oracles.gradient(case.oracle, kept) for slope in row]
    assert slopes == pytest.approx(expected, rel=1e-10, abs=1e-10)


def test_sequence_level_part_makes_the_loss_need_whole_rows() -> None:
    """If an objective has one of these parts, its loss needs whole rows (responses)."""
    assert build_objective(PartsObjective()).by_token
    for parts in (
        {"ratio": {"level": "sequence"}, "aggregation": "sequence-mean"},
        {"correction": {"outside": "mask", "weigh": False, "level": "geometric", "high": 2.0}},
        {"correction": {"outside": "mask", "weigh": False, "judge": "sequence", "high": 2.0}},
    ):
        assert not build_objective(PartsObjective.model_validate(parts)).by_token


# --- cases calculated by hand --------------------------------------------------------------------------------


def tokens_of(
    logp: list[float], behaviour: list[float], advantage: float, proximal: list[float] | None = None
) -> MaskedTokens:
    """Return tokens with the given probabilities under the policies."""

    def logs(values: list[float]) -> Tensor:
        return torch.tensor([math.log(value) for value in values], dtype=F64)

    rows, found = torch.zeros(len(logp), dtype=torch.int64), logs(proximal) if proximal else None
    advantage_M = torch.full((len(logp),), advantage, dtype=F64)
    return MaskedTokens(logs(logp).requires_grad_(), logs(behaviour), advantage_M, rows, found)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),  # r is within the clip: -(r A), and d(r A)/dlogp = r A
        (1.5, 2.0, -2.56, 0.0, True),  # r is above 1 + 0.28 and A > 0: clipped to 1.28 A
        (0.5, 2.0, -1.0, -1.0, False),  # r is below the clip and A > 0: not clipped (min takes r A)
        (0.5, -2.0, 1.6, 0.0, True),  # r is below 1 - 0.2 and A < 0: clipped to 0.8 A
        (1.5, -2.0, 3.0, 3.0, False),  # r is above the clip and A < 0: not clipped
    ],
)
def test_grpo_matches_a_hand_calculation(
    ratio: float, advantage: float, loss: float, slope: float, clipped: bool
) -> None:
    given = tokens_of([0.3 * ratio], [0.3], advantage)
    found = build_objective(PartsObjective()).loss(given)
    assert found.loss_M.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(found, given).item() == pytest.approx(slope, abs=1e-12)
    assert found.clipped_M.item() is clipped


# Two tokens of one response: pi = (0.36, 0.2), mu = (0.3, 0.5), so r = (1.2, 0.4): product 0.48, mean -0.367 nats;
# pi_p = (0.3, 0.25): pi/pi_p = (1.2, 0.8), pi_p/mu = (1, 0.5). log pi = (-1.0217, -1.6094).
LOGS = math.log(0.36), math.log(0.2)
BY_HAND: dict[str, tuple[float, list[float]]] = {
    "ppo": (2.0, [-2.4, -0.8]),  # -r A: the first ratio is 1.2, and 0.4 is not clipped for A > 0
    "grpo": (-2.0, [2.4, 1.6]),  # the second ratio is clipped to 0.8
    "dr-grpo": (1.0, [-1.2, -0.4]),
    "dapo": (2.0, [-2.4, -0.8]),
    "gspo": (2.0, [-2 * math.sqrt(0.48)] * 2),  # r = exp(mean) = sqrt(0.48) = 0.693 for both tokens
    "decoupled-ppo": (2.0, [-2.4, -0.8]),  # 1 x 1.2 x 2; 0.5 x 0.8 x 2
    "tis": (2.0, [-2.4 * LOGS[0], -0.8 * LOGS[1]]),  # neither ratio is above 2
    "mis": (2.0, [-2.4 * LOGS[0], 0.0]),  # the ratio 0.4 is below 0.5
    "geometric-mask": (2.0, [0.0, 0.0]),  # the ratio 0.693 is below 0.99
    "cispo": (2.0, [-2.4 * LOGS[0], -0.8 * LOGS[1]]),  # the ratio 0.4 has no lower bound
    "topr": (-2.0, [0.96 * LOGS[0], 0.96 * LOGS[1]]),  # the product 0.48 is below 1
    "weighted-topr": (2.0, [-2 * LOGS[0], -2 * LOGS[1]]),  # tokens with a positive advantage are not weighted
    "reinforce": (-2.0, [2 * LOGS[0], 2 * LOGS[1]]),
    "reinforce++": (-2.0, [2.4, 1.6]),
    "rloo": (1.0, [-LOGS[0], -LOGS[1]]),
    # log r = (0.1823, -0.9163), together -0.7340: shares of 0.05 x 0.5387 are -0.00669 and 0.03363
    "kimi": (0.0, [0.05 * math.log(0.48) * math.log(1.2), 0.05 * math.log(0.48) * math.log(0.4)]),
    # pi - mu = (0.06, -0.3): the second has gone too far down for A < 0; 1e-3 (log r)^2 stays
    "dppo": (-2.0, [2.4 + 1e-3 * math.log(1.2) ** 2, 1e-3 * math.log(0.4) ** 2]),
    "m2po": (2.0, [-2.4, 0.0]),  # (log pi_p/mu)^2 = (0, 0.48): mean 0.24, without the second 0
    "roll-current": (2.0, [-2.4, -1.6]),  # the ratios are pi/pi_p
    "gigpo": (-2.0, [2.4, 1.6]),  # as grpo; the advantages are in `test_turn_advantages.py`
    "echo": (-2.0, [2.4, 1.6]),  # as grpo; the observation loss is in `test_observation_loss.py`
}


def test_every_preset_has_a_hand_calculated_case() -> None:
    assert BY_HAND.keys() == PRESETS.keys()


@pytest.mark.parametrize("name", BY_HAND)
def test_preset_matches_a_hand_calculation(name: str) -> None:
    advantage, losses = BY_HAND[name]
    objective = build_objective(PartsObjective(kind=name))  # type: ignore[arg-type]
    given = tokens_of([0.36, 0.2], [0.3, 0.5], advantage, proximal=[0.3, 0.25])
    assert given.proximal_M is not None
    given = replace(given, kept_M=objective.keep(given.proximal_M, given.behaviour_M) if objective.uses_batch else None)
    assert objective.loss(given).loss_M.tolist() == pytest.approx(losses, abs=1e-12)


def test_decoupled_ppo_matches_a_hand_calculation() -> None:
    """pi = 0.36, pi_p = 0.3, mu = 0.2: q = 1.2, weight 1.5; with A = 2 the loss is -1.5 x 1.2 x 2 = -3.6."""
    given = tokens_of([0.36, 0.36, 0.36], [0.2, 0.2, 0.01], 2.0, proximal=[0.3, 0.2, 0.3])
    found = build_objective(PartsObjective(kind="decoupled-ppo")).loss(given)
    # second: q = 1.8 is clipped to 1.28, weight 1; third: weight 30 is capped at 5
    assert found.loss_M.tolist() == pytest.approx([-3.6, -2.56, -12.0], abs=1e-12)
    assert found.clipped_M.tolist() == [False, True, False]
    assert found.corrected_M is not None
    assert found.corrected_M.tolist() == [False, False, True]
    assert gradient(found, given).tolist() == pytest.approx([-3.6, 0.0, -12.0], abs=1e-12)


@pytest.mark.parametrize(
    ("part", "losses"),
    [
        # the surrogate alone is -r A = (-2.4, -0.8) for A = 2; d = log r = (0.18232, -0.91629)
        ({"penalties": {"kl": "k1", "kl_weight": 0.5}}, [0.5 * math.log(1.2), 0.5 * math.log(0.4)]),
        ({"penalties": {"kl": "k2", "kl_weight": 0.5}}, [0.25 * math.log(1.2) ** 2, 0.25 * math.log(0.4) ** 2]),
        ({"penalties": {"kl": "k3", "kl_weight": 1.0}}, [1 / 1.2 - 1 + math.log(1.2), 2.5 - 1 + math.log(0.4)]),
        ({"penalties": {"entropy_weight": 0.1}}, [-0.05, -0.2]),  # the tokens' entropies are 0.5 and 2
    ],
)
def test_kl_penalty_matches_a_hand_calculation(part: dict[str, object], losses: list[float]) -> None:
    objective = build_objective(kept(**part))
    entropy_M = torch.tensor([0.5, 2.0], dtype=F64)
    given = replace(tokens_of([0.36, 0.2], [0.3, 0.5], 2.0), entropy_M=entropy_M)
    assert objective.every_row
    assert objective.uses_entropy == (part.get("penalties") == {"entropy_weight": 0.1})
    expected = [-2.4 + losses[0], -0.8 + losses[1]]
    assert objective.loss(given).loss_M.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("part", "weights"),
    [
        # REINFORCE with A = 1, so losses are -weight log pi; r = (1.2, 0.4)
        ({"outside": "clamp", "low": 0.5, "high": 1.1}, [1.1, 0.5]),
        ({"outside": "clamp", "level": "sequence"}, [0.48, 0.48]),
        ({"outside": "clamp", "level": "geometric", "low": 0.7}, [0.7, 0.7]),
        ({"outside": "mask", "high": 1.1}, [0.0, 0.4]),
        ({"outside": "mask", "high": 1.1, "weigh": False}, [0.0, 1.0]),
        ({"outside": "mask", "low": 0.4, "high": 1.2}, [1.2, 0.4]),  # ratios equal to a bound are in range
        ({"outside": "mask", "low": 0.6, "judge": "geometric"}, [1.2, 0.4]),
        ({"outside": "mask", "low": 0.7, "judge": "geometric"}, [0.0, 0.0]),
        ({"outside": "mask", "low": 0.5, "judge": "sequence", "weigh": False}, [0.0, 0.0]),
    ],
)
def test_staleness_correction_matches_a_hand_calculation(part: dict[str, object], weights: list[float]) -> None:
    objective = build_objective(PartsObjective.model_validate({"kind": "reinforce", "correction": part}))
    found = objective.loss(tokens_of([0.36, 0.2], [0.3, 0.5], 1.0)).loss_M
    assert found.tolist() == pytest.approx([-weights[0] * LOGS[0], -weights[1] * LOGS[1]], abs=1e-12)


def test_second_moment_mask_keeps_as_many_tokens_as_possible() -> None:
    """The squared log-ratios are 0.01, 0.04, 0.09 and 0.16. The means of the first one to four squares are 0.01, 0.025,
    0.0467 and 0.075.
    """
    objective = build_objective(PartsObjective(kind="m2po"))
    changes = torch.tensor([-0.3, 0.1, 0.4, -0.2], dtype=F64)
    assert objective.keep(changes, torch.zeros(4, dtype=F64)).tolist() == [False, True, False, True]
    assert objective.keep(changes[1:2], torch.zeros(1, dtype=F64)).tolist() == [True]
    assert objective.keep(changes[2:3], torch.zeros(1, dtype=F64)).tolist() == [False]
    assert objective.keep(changes[:0], changes[:0]).tolist() == []


@pytest.mark.parametrize(
    ("name", "advantage", "clipped"),
    [
        ("tis", 1.0, [False, False, True]),  # the ratios are 1.2, 0.4, 3; the third is above 2
        ("cispo", 1.0, [False, False, True]),  # the third ratio is above 1.28
        ("reinforce", 1.0, [False, False, False]),
        ("topr", 1.0, [False, False, False]),  # tokens with a positive advantage have weight 1
        ("topr", -1.0, [True, True, True]),  # the product 1.2 x 0.4 x 3 is above 1
        ("dppo", 1.0, [False, False, True]),  # pi - mu = 0.06, -0.3, 0.6
        ("dppo", -1.0, [False, True, False]),
        ("kimi", 1.0, [False, False, False]),
    ],
)
def test_clipped_tokens_are_reported(name: str, advantage: float, clipped: list[bool]) -> None:
    given = tokens_of([0.36, 0.2, 0.9], [0.3, 0.5, 0.3], advantage)
    found = build_objective(PartsObjective(kind=name)).loss(given)  # type: ignore[arg-type]
    assert found.clipped_M.tolist() == clipped
    assert found.corrected_M is None


@pytest.mark.parametrize(
    ("name", "corrected"),
    [
        ("mis", [False, True, False]),  # the ratios are 1.2, 0.4, 3; the second is below 0.5
        ("geometric-mask", [True, True, True]),  # the mean (1.2 x 0.4 x 3)^(1/3) = 1.13 is above 1.01
        ("decoupled-ppo", [False, False, True]),  # pi_p/mu = 1, 0.5, 6; the third is above 5
    ],
)
def test_corrected_tokens_are_reported(name: str, corrected: list[bool]) -> None:
    given = tokens_of([0.36, 0.2, 0.45], [0.3, 0.5, 0.15], 1.0, proximal=[0.3, 0.25, 0.9])
    found = build_objective(PartsObjective(kind=name)).loss(given)  # type: ignore[arg-type]
    assert found.corrected_M is not None
    assert found.corrected_M.tolist() == corrected


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_log_ratio_is_clipped(level: Level) -> None:
    """Log-ratios are clipped to 20 nats; a clipped log-ratio has no gradient."""
    new = torch.tensor([50.0, 30.0, -90.0], dtype=F64, requires_grad=True)
    found = log_ratio(new, torch.zeros(3, dtype=F64), torch.tensor([0, 0, 1]), level)
    assert found.tolist() == [20.0, 20.0, -20.0]
    [slope] = torch.autograd.grad(found.sum(), new)
    assert slope.tolist() == [0.0, 0.0, 0.0]


def test_decoupled_ppo_equals_grpo_if_proximal_is_behaviour() -> None:
    given = draw_tokens()
    on_policy = replace(given, proximal_M=given.behaviour_M)
    a, b = (
        build_objective(config).loss(on_policy) for config in (PartsObjective(), PartsObjective(kind="decoupled-ppo"))
    )
    torch.testing.assert_close(a.loss_M, b.loss_M)


# --- user-defined objectives --------------------------------------------------------------------------------


class Mean(Objective):
    """An objective that returns one number for all tokens. Torch would broadcast this number over the tokens."""

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        return TokenLoss(-(tokens.logp_M * tokens.advantage_M).mean(), torch.zeros_like(tokens.logp_M).bool())


def test_loss_must_return_one_number_per_token() -> None:
    objective = build_objective(ImportObjective(path=f"{__name__}:Mean"))
    with pytest.raises(ConfigError, match=r"train\.objective\.path = .*shapes \(\) and \(200,\) for 200 tokens"):
        objective.loss(draw_tokens())


class Silent(Objective):
    """An objective whose `loss` does not return a `TokenLoss`."""

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        return tokens.logp_M  # type: ignore[return-value]


class Detached(Objective):
    """An objective whose loss has no gradient."""

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        return TokenLoss(-tokens.logp_M.detach() * tokens.advantage_M, torch.zeros_like(tokens.logp_M).bool())


@pytest.mark.parametrize(
    ("name", "words"),
    [("Silent", "the method loss returned a Tensor; return rollflow's TokenLoss"), ("Detached", "has no gradient")],
)
def test_loss_of_wrong_type_or_without_gradient_is_refused(name: str, words: str) -> None:
    objective = build_objective(ImportObjective(path=f"{__name__}:{name}"))
    with pytest.raises(ConfigError, match=rf"train\.objective\.path = .*{words}"):
        objective.loss(draw_tokens())


def test_objective_with_unknown_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_reach(monkeypatch, FOLDER)
    with pytest.raises(
        ConfigError, match=r"train\.objective\.options = \{'lid': 3\}: .* give options that the part accepts"
    ):
        build_objective(OWN.model_copy(update={"options": {"lid": 3}}))


class Cut(Detached):
    """An objective in which the loss of a token depends only on that token."""

    by_token = True


class Looks(Cut):
    """A subclass that replaces the loss and does not set `by_token`."""


def test_subclass_does_not_inherit_the_by_token_flag() -> None:
    """The new loss of a subclass may need whole rows, so `by_token` is false unless the subclass itself sets it."""
    for name, expected in (("Detached", False), ("Cut", True), ("Looks", False)):
        assert build_objective(ImportObjective(path=f"{__name__}:{name}")).by_token is expected


@pytest.mark.parametrize("kind", PRESETS)
def test_token_of_advantage_zero_is_never_clipped(kind: PresetName) -> None:
    """A token of advantage zero does not count as clipped, because clipping would not change the token's loss."""
    given, objective = draw_tokens(), build_objective(PartsObjective(kind=kind))
    assert not bool(objective.loss(given).clipped_M[given.advantage_M == 0].any())


class Unsure(Mean):
    """An objective that needs the whole batch, and whose `keep` returns a wrong type."""

    uses_batch = True

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        return proximal_B - behaviour_B


def test_keep_method_must_return_one_bool_per_token() -> None:
    objective = build_objective(ImportObjective(path=f"{__name__}:Unsure"))
    assert objective.uses_batch
    with pytest.raises(ConfigError, match=r"train\.objective\.path = .*keep did not return one bool for each of 3"):
        objective.keep(torch.zeros(3), torch.zeros(3))
