"""Wraps a user-defined objective: imports a class that derives from `Objective`, and creates an object with the
configured options."""

from __future__ import annotations

import torch
from torch import Tensor

from rollflow.storage.errors import ConfigError
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import ImportObjective
from rollflow.tasks.runtime.imports import imported_object

KEY = "train.objective"


class ImportedObjective(Objective):
    """A wrapper of the user-defined objective at the import path `train.objective.path`.

    A loss of a wrong shape is rejected, because torch would broadcast it without an error.
    """

    def __init__(self, config: ImportObjective) -> None:
        """Import the class of the user-defined objective; raise `ConfigError` if the class does not exist or rejects
        the options."""
        self._path = config.path
        self._own = imported_object(KEY, config, Objective, optional="keep")  # type: ignore[type-abstract]
        for name in ("uses_proximal", "uses_entropy", "uses_reference", "uses_batch", "every_row"):
            setattr(self, name, getattr(self._own, name))
        self.by_token = bool(vars(type(self._own)).get("by_token"))  # type: ignore[misc]  # see `base`

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        found: object = self._own.loss(tokens)
        if not isinstance(found, TokenLoss):
            raise self._refusal(f"the method loss returned a {type(found).__name__}; return rollflow's TokenLoss")
        shapes = found.loss_M.shape, found.clipped_M.shape
        if shapes != (tokens.logp_M.shape,) * 2:
            sizes = " and ".join(str(tuple(shape)) for shape in shapes)
            words = f"the method loss returned loss and clipped of shapes {sizes} for {len(tokens.logp_M)} tokens"
            raise self._refusal(f"{words}; return one number for each token")
        if not found.loss_M.requires_grad:
            raise self._refusal(
                "the loss of this objective has no gradient; compute the loss from logp_M without detach()"
            )
        return found

    def keep(self, proximal_B: Tensor, behaviour_B: Tensor) -> Tensor:
        """See `Objective`."""
        found: object = self._own.keep(proximal_B, behaviour_B)
        if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != proximal_B.shape:
            raise self._refusal(
                f"the method keep did not return one bool for each of {len(proximal_B)} tokens; return a bool "
                "tensor of that length"
            )
        return found

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"{KEY}.path = {self._path!r}: {why}")
