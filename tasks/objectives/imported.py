"""An objective of your own: a class that derives from `Objective`, made with its options."""

from __future__ import annotations

from rollflow.storage.errors import ConfigError
from rollflow.tasks.imports import imported_class, made
from rollflow.tasks.objectives.base import MaskedTokens, Objective, TokenLoss
from rollflow.tasks.objectives.config import ImportObjective

KEY = "train.objective"


class ImportedObjective(Objective):
    """The one that `train.objective.path` names. A loss of another shape would be spread over all tokens: refused."""

    def __init__(self, config: ImportObjective) -> None:
        """ConfigError: there is no such class, or it takes other options."""
        found = imported_class(KEY, config, Objective)  # type: ignore[type-abstract]
        self._path = config.path
        self._own = made(KEY, config, lambda: found(**config.options))
        self.uses_proximal, self.every_row = found.uses_proximal, found.every_row  # type: ignore[misc]

    def loss(self, tokens: MaskedTokens) -> TokenLoss:
        """See `Objective`."""
        found = self._own.loss(tokens)
        shapes = found.loss_M.shape, found.clipped_M.shape
        if shapes != (tokens.logp_M.shape,) * 2:
            sizes = " and ".join(str(tuple(shape)) for shape in shapes)
            raise ConfigError(
                f"{KEY}.path = {self._path!r}: loss and clipped have the shapes {sizes}, of {len(tokens.logp_M)} "
                "tokens; give one number a token"
            )
        return found
