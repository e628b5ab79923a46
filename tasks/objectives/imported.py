"""An objective of your own: a class that derives from `Objective`, made with its options."""

from __future__ import annotations

from rollflow.storage.errors import ConfigError
from rollflow.tasks.imports import imported_object
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import ImportObjective

KEY = "train.objective"


class ImportedObjective(Objective):
    """The one that `train.objective.path` names. A loss of another shape would be spread over all tokens: refused."""

    def __init__(self, config: ImportObjective) -> None:
        """ConfigError: there is no such class, or it takes other options."""
        self._path = config.path
        self._own = imported_object(KEY, config, Objective)  # type: ignore[type-abstract]
        self.uses_proximal, self.every_row = self._own.uses_proximal, self._own.every_row  # type: ignore[misc]

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        found: object = self._own.loss(tokens)
        if not isinstance(found, TokenLoss):
            raise self._refused(f"it gave a {type(found).__name__}; give rollflow's TokenLoss")
        shapes = found.loss_M.shape, found.clipped_M.shape
        if shapes != (tokens.logp_M.shape,) * 2:
            sizes = " and ".join(str(tuple(shape)) for shape in shapes)
            words = f"loss and clipped have the shapes {sizes}, of {len(tokens.logp_M)} tokens"
            raise self._refused(f"{words}; give one number a token")
        if not found.loss_M.requires_grad:
            raise self._refused("its loss has no gradient; make it of logp_M, which is not to be detached")
        return found

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"{KEY}.path = {self._path!r}: {why}")
