"""Tests the contract of objectives, which `rollflow.tasks.objectives.base` describes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from rollflow.storage.errors import ConfigError
from rollflow.tasks.objectives import build_objective
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import ImportObjective
from rollflow.testing.bounds import import_keys

F64 = torch.float64
ROWS, LENGTH = 40, 5  # rows of `draw_tokens`, and tokens of each row


def draw_tokens(spread: float = 0.5, dtype: torch.dtype = F64) -> MaskedTokens:
    """Draw 200 tokens in rows of five; advantages are positive, negative or zero. The policies' log-probs differ by
    about `spread` nats.
    """
    draw, count = torch.Generator().manual_seed(0), ROWS * LENGTH

    def normal() -> Tensor:
        return torch.randn(count, dtype=dtype, generator=draw)

    logp_M, rows = -4 - normal().abs(), torch.arange(count) // LENGTH
    advantage_M = normal()[rows] * (rows % 4 != 3)
    return MaskedTokens(
        logp_M.requires_grad_(),
        logp_M.detach() + spread * normal(),
        advantage_M,
        rows,
        logp_M.detach() + spread * normal(),
        normal().abs().requires_grad_(),
        normal() < 1,
        logp_M.detach() + spread * normal(),
    )


def gradient(found: TokenLoss, given: MaskedTokens) -> Tensor:
    """Return the gradient of the summed loss by `logp_M`."""
    [slope_M] = torch.autograd.grad(found.loss_M.sum(), given.logp_M)
    return slope_M


def pick(given: MaskedTokens, where_M: Tensor) -> MaskedTokens:
    """Return the tokens at the positions `where_M`, in the order of `where_M`."""
    whole = {field.name: getattr(given, field.name) for field in fields(given)}
    columns = {name: value[where_M].detach() for name, value in whole.items() if value is not None}
    leaves = {name: columns[name].requires_grad_() for name in ("logp_M", "entropy_M")}
    return replace(MaskedTokens(**columns), **leaves)


class ObjectiveContract:
    """Tests of an objective. A subclass names the class by `path`."""

    path: ClassVar[str]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def objective(self) -> Objective:
        """Return the objective under test; a subclass may override this fixture."""
        return build_objective(ImportObjective(**import_keys(type(self))))

    def loss(self, objective: Objective, given: MaskedTokens) -> TokenLoss:
        """Return the loss of each token; fail if a run would refuse the loss."""
        try:
            return objective.loss(given)
        except ConfigError as error:
            pytest.fail(f"a run refuses this objective: {error}", pytrace=False)

    def test_by_token_is_true_if_tokens_are_independent(self, objective: Objective) -> None:
        """If `by_token` were wrongly True, the losses of split rows would be wrong. If it were wrongly False, memory
        would be wasted.
        """
        given, some_M = draw_tokens(), torch.arange(ROWS * LENGTH) % LENGTH < 2
        whole, cut = self.loss(objective, given), self.loss(objective, pick(given, some_M))
        same = torch.equal(whole.loss_M[some_M], cut.loss_M) and torch.equal(whole.clipped_M[some_M], cut.clipped_M)
        assert same is objective.by_token, (
            "`by_token` must be True exactly if a token's loss depends on that token only: "
            f"it is {objective.by_token}, and the loss of some tokens of a row is {'the same' if same else 'another'}"
        )

    def test_good_answers_become_likelier_and_bad_ones_less(self, objective: Objective) -> None:
        given = draw_tokens()
        slope_M = gradient(self.loss(objective, given), given)
        if not objective.every_row:  # the gradient of a penalty may have the opposite sign
            assert bool((slope_M * given.advantage_M <= 0).all()), (
                "a smaller loss must make tokens of positive advantage likelier, and of negative advantage less likely"
            )
        assert bool((slope_M[given.advantage_M != 0] != 0).any()), "an advantage must give a gradient"

    def test_row_of_advantage_zero_has_no_gradient(self, objective: Objective) -> None:
        given = draw_tokens()
        zero_M = given.advantage_M == 0
        assert bool(zero_M.any())
        assert objective.every_row or not bool(gradient(self.loss(objective, given), given)[zero_M].any()), (
            "a row of advantage zero must have no gradient, unless the objective sets `every_row`"
        )

    @pytest.mark.parametrize("dtype", [torch.float32, F64])
    def test_loss_is_finite_for_policies_far_apart(self, objective: Objective, dtype: torch.dtype) -> None:
        given = draw_tokens(spread=20.0, dtype=dtype)
        found = self.loss(objective, given)
        assert found.loss_M.dtype == dtype, f"the loss must have the dtype of `logp_M`: {found.loss_M.dtype}"
        assert found.clipped_M.dtype == torch.bool, f"`clipped_M` must be bool: {found.clipped_M.dtype}"
        assert found.loss_M.shape == found.clipped_M.shape == given.logp_M.shape
        assert bool(found.loss_M.isfinite().all()), "a loss must be finite for policies far apart, so clip the ratio"
        assert bool(gradient(found, given).isfinite().all()), "a gradient must be finite for policies far apart"

    def test_same_tokens_give_the_same_loss(self, objective: Objective) -> None:
        given = draw_tokens()
        first, second = self.loss(objective, given), self.loss(objective, given)
        assert torch.equal(first.loss_M, second.loss_M), "the same tokens must give the same loss, bit for bit"
        assert torch.equal(gradient(first, given), gradient(second, given))

    def test_rows_do_not_depend_on_each_other(self, objective: Objective) -> None:
        """The rows are kept whole, as in a batch that is split into micro-batches."""
        given = draw_tokens()
        whole = self.loss(objective, given)
        whole_M = gradient(whole, given)
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
        sentence = "a row's loss must not depend on other rows or on their order"
        for some in (rows, rows[:7], rows[7:]):
            where_M = torch.cat([torch.nonzero(given.row_M == row)[:, 0] for row in some])
            part = replace(pick(given, where_M), row_M=torch.arange(len(some)).repeat_interleave(LENGTH))
            found = self.loss(objective, part)
            assert torch.equal(found.loss_M, whole.loss_M[where_M]), sentence
            assert torch.equal(found.clipped_M, whole.clipped_M[where_M]), sentence
            assert torch.equal(gradient(found, part), whole_M[where_M]), sentence

    def test_values_that_are_not_requested_are_not_read(self, objective: Objective) -> None:
        """A learner gives None for each value that the objective does not request."""
        given, without = draw_tokens(), dict[str, Any]()
        if not objective.uses_proximal:
            without["proximal_M"] = None
        if not objective.uses_entropy:
            without["entropy_M"] = None
        if not objective.uses_reference:
            without["reference_M"] = None
        if not objective.uses_batch:
            without["kept_M"] = None
        try:
            found = self.loss(objective, replace(given, **without))
        except (TypeError, AttributeError) as error:
            pytest.fail(f"an objective must request the values that it reads ({', '.join(without)}): {error}")
        assert torch.equal(found.loss_M, self.loss(objective, given).loss_M), (
            "an objective must not use values that it does not request"
        )
