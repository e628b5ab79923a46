"""Imports a user-defined verifier, a function in one of the forms that the module `verifier` lists.

If the function has an attribute `close`, this attribute is called to end the processes and connections that the
verifier keeps between calls.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Sequence
from types import FunctionType, UnionType
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.runtime.imports import build_part, imported_function, read_return_type
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.config import ImportReward
from rollflow.tasks.scorers.verifier import Verifier

# largest size of the `[reward]` section in bytes; a worker process gets the section as a command-line argument
LONGEST = 100_000
ONE, SEVERAL = ("response", "reference"), ("responses", "references")  # names of the first two arguments
NUMBERS = (float, int, bool)


def imported_verifier(config: ImportReward, section: str = "reward") -> Verifier:
    """Import the function that the key `path` of the config section names, and bind the section's options to its
    arguments.

    Raises:
        ConfigError: the function does not exist, does not accept the options, or the options are too large.
    """
    if (size := len(config.model_dump_json().encode())) > LONGEST:
        wrong = f"the options have {size} bytes, more than the {LONGEST} allowed"
        cure = "write large values into a file, and give the path of the file"
        raise ConfigError(f"{section}.options = {str(config.options)[:40]}...: {wrong}; {cure}")
    function = imported_function(section, config, Score, _is_scorer)
    more = {"tokens": ()} if (takes_tokens := _takes_tokens(function, config)) else {}
    build_part(section, config, lambda: inspect.signature(function).bind("", {}, **more, **config.options))
    several = _read_element(read_return_type(function)) is not None
    own, end = functools.partial(function, **config.options), getattr(function, "close", None)
    if end is not None and not callable(end):
        raise ConfigError(
            f"{section}.path = {config.path!r}: close must be a function, but this object has another attribute "
            "of this name; make it a function"
        )
    return Verifier(own, several, inspect.iscoroutinefunction(function), takes_tokens, end)


def _takes_tokens(function: FunctionType, config: ImportReward) -> bool:
    """Return whether a function has an argument `tokens` that has no default and that no option of the config sets."""
    argument = inspect.signature(function).parameters.get("tokens")
    return argument is not None and argument.default is argument.empty and "tokens" not in config.options


def _is_scorer(function: FunctionType, annotation: Any) -> bool:
    """Return whether a function is a verifier. The return type decides; if the function returns numbers, the names of
    its first two arguments decide, too.

    A verifier returns a `Score` or a number, or a list of them for several responses.
    """
    element = _read_element(annotation)
    kinds = _list_members(annotation if element is None else element)
    if not kinds or not all(kind is Score or kind in NUMBERS for kind in kinds):
        return False
    return Score in kinds or tuple(inspect.signature(function).parameters)[:2] == (ONE if element is None else SEVERAL)


def _read_element(annotation: Any) -> Any:
    """Return the element type T of an annotation `list[T]` or `Sequence[T]`, or None for another annotation."""
    is_several = typing.get_origin(annotation) in (list, Sequence)
    return typing.get_args(annotation)[0] if is_several else None


def _list_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union type; for any other type, return only the type."""
    is_union = typing.get_origin(annotation) in (typing.Union, UnionType)
    return typing.get_args(annotation) if is_union else () if annotation is None else (annotation,)
