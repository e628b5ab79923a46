"""What every objective guarantees, on each kind. A new one is one line in CASES, with its formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import Tensor

from rollflow.storage.errors import ConfigError
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import DecoupledPpoObjective, GrpoObjective, ImportObjective, ObjectiveConfig
from tests.support.own_parts import FOLDER, put_in_reach

F64 = torch.float64
STEP = 1e-6  # of the differences that gradients are compared with

Formula = Callable[[float, float, float, float, float], float]  # log pi, sg(log pi), log mu, log pi_p, A -> loss


def held(ratio: float, advantage: float) -> float:
    return -min(ratio * advantage, min(max(ratio, 0.8), 1.28) * advantage)


def grpo(pi: float, _: float, mu: float, __: float, advantage: float) -> float:
    return held(math.exp(pi - mu), advantage)


def dual_clipped(pi: float, _: float, mu: float, __: float, advantage: float) -> float:
    found = held(math.exp(pi - mu), advantage)
    return min(found, -2.0 * advantage) if advantage < 0 else found


def decoupled_ppo(pi: float, _: float, mu: float, proximal: float, advantage: float) -> float:
    return min(math.exp(proximal - mu), 5.0) * held(math.exp(pi - proximal), advantage)


def truncated_reinforce(pi: float, stopped: float, mu: float, _: float, advantage: float) -> float:
    return -min(math.exp(stopped - mu), 3.0) * advantage * pi


@dataclass(frozen=True)
class Case:
    """An objective and the formula of one token's loss, in plain floats."""

    config: ObjectiveConfig
    formula: Formula


OWN = ImportObjective(path="letters.objectives:TruncatedReinforce", options={"cap": 3.0})
CASES = {
    "grpo": Case(GrpoObjective(), grpo),
    "dual-clip": Case(GrpoObjective(dual_clip=2.0), dual_clipped),
    "decoupled-ppo": Case(DecoupledPpoObjective(), decoupled_ppo),
    "import": Case(OWN, truncated_reinforce),
}


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    put_in_reach(monkeypatch, FOLDER)
    found: Case = request.param
    return found


@pytest.fixture
def objective(case: Case) -> Objective:
    return build_objective(case.config)


def tokens(count: int = 200, spread: float = 0.5, dtype: torch.dtype = F64) -> MaskedTokens:
    """Tokens of rows of five, with advantages of both signs and some of zero."""
    draw = torch.Generator().manual_seed(0)

    def normal() -> Tensor:
        return torch.randn(count, dtype=dtype, generator=draw)

    logp_M, rows = -4 - normal().abs(), torch.arange(count) // 5
    advantage_M = normal()[rows] * (rows % 4 != 3)
    return MaskedTokens(
        logp_M.requires_grad_(),
        logp_M.detach() + spread * normal(),
        advantage_M,
        rows,
        logp_M.detach() + spread * normal(),
    )


def gradient(found: TokenLoss, given: MaskedTokens) -> Tensor:
    [made_M] = torch.autograd.grad(found.loss_M.sum(), given.logp_M)
    return made_M


def each(given: MaskedTokens) -> list[tuple[float, float, float, float]]:
    """Token by token: log pi, log mu, log pi_p, A."""
    assert given.proximal_M is not None
    columns = given.logp_M, given.behaviour_M, given.proximal_M, given.advantage_M
    return list(zip(*(column.tolist() for column in columns), strict=True))


def picked(given: MaskedTokens, where_M: Tensor) -> MaskedTokens:
    """Some of the tokens, in another order."""
    columns = {field.name: getattr(given, field.name)[where_M].detach() for field in fields(given)}
    return replace(MaskedTokens(**columns), logp_M=columns["logp_M"].requires_grad_())


def test_there_is_a_case_for_every_kind() -> None:
    kinds = ObjectiveConfig.__origin__.__args__  # type: ignore[attr-defined]
    assert {type(case.config) for case in CASES.values()} == set(kinds)


def test_the_loss_is_that_of_the_formula(case: Case, objective: Objective) -> None:
    given = tokens()
    expected = [case.formula(pi, pi, mu, proximal, a) for pi, mu, proximal, a in each(given)]
    found = objective.loss(given)
    assert found.loss_M.tolist() == pytest.approx(expected, rel=1e-12)
    assert 0 < int(found.clipped_M.sum()) < len(found.clipped_M)


def test_so_is_its_gradient(case: Case, objective: Objective) -> None:
    """By central differences in the log-prob; what is under a stop-gradient stays."""
    given = tokens()
    expected = [
        (case.formula(pi + STEP, pi, mu, p, a) - case.formula(pi - STEP, pi, mu, p, a)) / (2 * STEP)
        for pi, mu, p, a in each(given)
    ]
    assert gradient(objective.loss(given), given).tolist() == pytest.approx(expected, abs=1e-7)


def test_a_good_answer_becomes_likelier_and_a_bad_one_less(objective: Objective) -> None:
    given = tokens()
    found_M = gradient(objective.loss(given), given)
    assert bool((found_M * given.advantage_M <= 0).all())
    assert bool((found_M[given.advantage_M != 0] != 0).any())


def test_a_row_of_advantage_zero_has_no_gradient_unless_it_is_asked_for(objective: Objective) -> None:
    given = tokens()
    zero_M = given.advantage_M == 0
    assert bool(zero_M.any())
    assert objective.every_row or not bool(gradient(objective.loss(given), given)[zero_M].any())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_it_is_finite_where_two_policies_have_nothing_in_common(objective: Objective, dtype: torch.dtype) -> None:
    given = tokens(spread=20.0, dtype=dtype)
    found = objective.loss(given)
    assert found.loss_M.dtype == dtype
    assert found.clipped_M.dtype == torch.bool
    assert found.loss_M.shape == found.clipped_M.shape == given.logp_M.shape
    assert bool(found.loss_M.isfinite().all())
    assert bool(gradient(found, given).isfinite().all())


def test_the_order_of_rows_and_who_else_is_there_changes_nothing(objective: Objective) -> None:
    """Rows stay whole, as they do when a batch is split into micro-batches."""
    given = tokens()
    whole = objective.loss(given)
    whole_M = gradient(whole, given)
    rows = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    for some in (rows, rows[:7], rows[7:]):
        where_M = torch.cat([torch.nonzero(given.row_M == row)[:, 0] for row in some])
        part = picked(given, where_M)
        found = objective.loss(replace(part, row_M=torch.arange(len(some)).repeat_interleave(5)))
        assert torch.equal(found.loss_M, whole.loss_M[where_M])
        assert torch.equal(found.clipped_M, whole.clipped_M[where_M])
        assert torch.equal(gradient(found, part), whole_M[where_M])


def test_it_does_without_a_proximal_policy_where_it_does_not_ask_for_one(objective: Objective) -> None:
    given = tokens()
    if not objective.uses_proximal:
        assert torch.equal(objective.loss(replace(given, proximal_M=None)).loss_M, objective.loss(given).loss_M)


# --- one by one, by hand ------------------------------------------------------------------------------------


def tokens_of(
    logp: list[float], behaviour: list[float], advantage: float, proximal: list[float] | None = None
) -> MaskedTokens:
    """Tokens of given probabilities."""

    def logs(values: list[float]) -> Tensor:
        return torch.tensor([math.log(value) for value in values], dtype=F64)

    rows, found = torch.zeros(len(logp), dtype=torch.int64), logs(proximal) if proximal else None
    advantage_M = torch.full((len(logp),), advantage, dtype=F64)
    return MaskedTokens(logs(logp).requires_grad_(), logs(behaviour), advantage_M, rows, found)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.1, 2.0, -2.2, -2.2, False),  # inside: -(r A), and d(r A)/dlogp = r A
        (1.5, 2.0, -2.56, 0.0, True),  # above 1 + 0.28 with A > 0: held at 1.28 A
        (0.5, 2.0, -1.0, -1.0, False),  # below with A > 0: not held (min takes r A)
        (0.5, -2.0, 1.6, 0.0, True),  # below 1 - 0.2 with A < 0: held at 0.8 A
        (1.5, -2.0, 3.0, 3.0, False),  # above with A < 0: not held
    ],
)
def test_grpo_by_hand(ratio: float, advantage: float, loss: float, slope: float, clipped: bool) -> None:
    given = tokens_of([0.3 * ratio], [0.3], advantage)
    found = build_objective(GrpoObjective()).loss(given)
    assert found.loss_M.item() == pytest.approx(loss, abs=1e-12)
    assert gradient(found, given).item() == pytest.approx(slope, abs=1e-12)
    assert found.clipped_M.item() is clipped


def test_decoupled_ppo_by_hand() -> None:
    """pi = 0.36, pi_p = 0.3, mu = 0.2: q = 1.2, weight 1.5; with A = 2 the loss is -1.5 x 1.2 x 2 = -3.6."""
    given = tokens_of([0.36, 0.36, 0.36], [0.2, 0.2, 0.01], 2.0, proximal=[0.3, 0.2, 0.3])
    found = build_objective(DecoupledPpoObjective()).loss(given)
    # second: q = 1.8 is held at 1.28, weight 1; third: weight 30 is capped at 5
    assert found.loss_M.tolist() == pytest.approx([-3.6, -2.56, -12.0], abs=1e-12)
    assert found.clipped_M.tolist() == [False, True, True]
    assert gradient(found, given).tolist() == pytest.approx([-3.6, 0.0, -12.0], abs=1e-12)


def test_decoupled_ppo_on_policy_is_grpo() -> None:
    given = tokens()
    on_policy = replace(given, proximal_M=given.behaviour_M)
    a, b = (build_objective(config).loss(on_policy) for config in (GrpoObjective(), DecoupledPpoObjective()))
    torch.testing.assert_close(a.loss_M, b.loss_M)


# --- of your own --------------------------------------------------------------------------------------------


class Mean(Objective):
    """It gives one number for all tokens, which would be spread over each of them."""

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        return TokenLoss(-(tokens.logp_M * tokens.advantage_M).mean(), torch.zeros_like(tokens.logp_M).bool())


def test_a_loss_that_is_not_one_number_a_token_is_refused() -> None:
    objective = build_objective(ImportObjective(path=f"{__name__}:Mean"))
    with pytest.raises(ConfigError, match=r"train\.objective\.path = .*the shapes \(\) and \(200,\), of 200 tokens"):
        objective.loss(tokens())


class Silent(Objective):
    """It keeps its loss to itself."""

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        return tokens.logp_M  # type: ignore[return-value]


class Detached(Objective):
    """There is nothing to learn from its loss."""

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        return TokenLoss(-tokens.logp_M.detach() * tokens.advantage_M, torch.zeros_like(tokens.logp_M).bool())


@pytest.mark.parametrize(
    ("name", "words"), [("Silent", "it gave a Tensor; give rollflow's TokenLoss"), ("Detached", "has no gradient")]
)
def test_a_loss_that_nothing_can_be_learnt_from_is_refused(name: str, words: str) -> None:
    objective = build_objective(ImportObjective(path=f"{__name__}:{name}"))
    with pytest.raises(ConfigError, match=rf"train\.objective\.path = .*{words}"):
        objective.loss(tokens())


def test_an_objective_that_takes_other_options_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_reach(monkeypatch, FOLDER)
    with pytest.raises(
        ConfigError, match=r"train\.objective\.options = \{'lid': 3\}: .* give it options that it takes"
    ):
        build_objective(OWN.model_copy(update={"options": {"lid": 3}}))
