"""A user-defined verifier: a function `(response, reference, **options) -> Score`."""

from __future__ import annotations

import functools
import inspect

from rollflow.storage.errors import ConfigError
from rollflow.tasks.runtime.imports import build_part, imported_function
from rollflow.tasks.scorers.base import Score, Verifier
from rollflow.tasks.scorers.config import ImportReward

LONGEST = 100_000  # most bytes of the section, an argument of the worker's command; Linux allows 131,071


def imported_verifier(config: ImportReward) -> Verifier:
    """Import the function that `reward.path` names, and bind the function's options.

    Raises:
        ConfigError: there is no such function, it takes other options, or the options are too long for a worker.
    """
    if (size := len(config.model_dump_json().encode())) > LONGEST:
        cure = f"write what is large into a file, and give its path ({LONGEST} bytes at most)"
        raise ConfigError(f"reward.options = {str(config.options)[:40]}...: {size} bytes; {cure}")
    function = imported_function("reward", config, returns=Score)
    build_part("reward", config, lambda: inspect.signature(function).bind("", {}, **config.options))
    return functools.partial(function, **config.options)
