"""A verifier of your own: a function `(response, reference, **options) -> Score`."""

from __future__ import annotations

import functools
import inspect

from rollflow.tasks.imports import imported_function, made
from rollflow.tasks.verifiers.base import Score, Verifier
from rollflow.tasks.verifiers.config import ImportReward


def imported_verifier(config: ImportReward) -> Verifier:
    """The function that `reward.path` names, with its options.

    Raises:
        ConfigError: there is no such function, or it takes other options.
    """
    function = imported_function("reward", config, returns=Score)
    made("reward", config, lambda: inspect.signature(function).bind("", {}, **config.options))
    return functools.partial(function, **config.options)
