"""Imports user-defined parts of a run, such as a scorer, by import path ("my_package.rewards:score").

Whoever can write to a run's storage chooses the import paths in its config, so a path may name only certain functions
and classes. A path may name only a function annotated to return the expected type, or a class derived from the expected
base class. A function that returns plain numbers is a scorer if its arguments have a scorer's names.

The package of a part must be installed on every node, or its folder must be in PYTHONPATH.
"""

from __future__ import annotations

import importlib
import inspect
import os
import typing
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar

from rollflow.storage.errors import ConfigError
from rollflow.tasks.runtime.sections import Imported

T = TypeVar("T")


def imported_function(
    key: str, part: Imported, returns: type, accepts: Callable[[FunctionType, Any], bool] | None = None
) -> FunctionType:
    """Import the user-defined function that `part` names. `key` is the config section of the part.

    Args:
        returns: the function must be annotated to return this type.
        accepts: this function decides whether a return annotation is accepted; by default the annotation must be
            `returns`.

    Raises:
        ConfigError: the function does not exist, is a generator, or has a return annotation that is not accepted.
    """
    found = _find_attribute(key, part)
    name = returns.__name__
    accepts = accepts or (lambda _, annotation: annotation is returns)
    if not (isinstance(found, FunctionType) and accepts(found, read_return_type(found))):
        cure = f"write `-> {name}`, with `from {returns.__module__} import {name}`"
        raise _build_error(
            key, part, f"the path does not name a function that is annotated to return rollflow's {name}; {cure}"
        )
    if inspect.isgeneratorfunction(found) or inspect.isasyncgenfunction(found):
        raise _build_error(key, part, f"the function uses yield; write a function that returns its {name}")
    return found


def imported_class(key: str, part: Imported, contract: type[T]) -> type[T]:
    """Import the user-defined class that `part` names. `key` is the config section of the part.

    Raises:
        ConfigError: the class does not exist, or does not derive from `contract`.
    """
    found = _find_attribute(key, part)
    if not isinstance(found, type) or contract not in found.__mro__[1:]:
        raise _build_error(
            key,
            part,
            f"the path does not name a class that derives from rollflow's {contract.__name__}; name such a class",
        )
    return found


def imported_object(key: str, part: Imported, contract: type[T], *, optional: str = "", **arguments: object) -> T:
    """Create an object of the user-defined class that `part` names, from `arguments` and the part's options.

    The class need not define the method that `optional` names.

    Raises:
        ConfigError: the class does not exist, rejects the options, or lacks a required method of `contract`.
    """
    found: Any = imported_class(key, part, contract)
    own = build_part(key, part, lambda: found(**arguments, **part.options))
    if not isinstance(own, found):
        raise _build_error(
            key, part, f"creating an object of the class gives a {type(own).__name__} instead; change the class"
        )
    promised = [one for name, one in vars(contract).items() if isinstance(one, FunctionType) and name[0] != "_"]
    needed = [one for one in promised if one.__name__ != optional or not _is_missing(own, one)]
    if missing := [one for one in needed if _is_missing(own, one)]:
        shown = " and ".join(f"{one.__name__}({', '.join(inspect.signature(one).parameters)})" for one in missing)
        what = f"the method {shown}; write it" if len(missing) == 1 else f"the methods {shown}; write them"
        raise _build_error(key, part, f"the class lacks {what}")
    for one in needed:
        _check_method(key, part, own, one)
    return typing.cast(T, own)


def _is_missing(own: object, promised: FunctionType) -> bool:
    """Return True if the class of `own` inherits a method of its contract instead of defining the method."""
    return getattr(getattr(own, promised.__name__), "__func__", None) is promised


def _check_method(key: str, part: Imported, own: object, promised: FunctionType) -> None:
    """Check that a user-defined class has a method with the right arguments.

    With a wrong method, every response would fail.
    """
    name = promised.__name__
    method = getattr(own, name)
    if inspect.iscoroutinefunction(promised) and not inspect.iscoroutinefunction(inspect.unwrap(method)):
        raise _build_error(key, part, f"the method {name} cannot be awaited; write `async def {name}`")
    _, *given = inspect.signature(promised).parameters
    try:
        inspect.signature(method).bind(*given)
    except (TypeError, ValueError) as error:
        raise _build_error(
            key, part, f"the method {name} does not take the arguments ({', '.join(given)}): {error}"
        ) from None


def build_part(key: str, part: Imported, make: Callable[[], T]) -> T:
    """Call `make`, which creates a user-defined part; raise any error as a `ConfigError`."""
    try:
        return make()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        what = f"{part.path} failed with {_describe_error(error)}"
        raise ConfigError(f"{key}.options = {part.options!r}: {what}; give options that the part accepts") from error


def code_of(key: str, part: Imported) -> str:
    """Return the SHA-256 of the source file of a user-defined part, or "" if there is no source file."""
    try:
        return sha256(Path(inspect.getsourcefile(_find_attribute(key, part)) or "").read_bytes()).hexdigest()
    except (OSError, TypeError):  # the part has no source file, or its source file is in an archive
        return ""


def _find_attribute(key: str, part: Imported) -> Any:
    module, _, name = part.path.partition(":")
    found = _import_module(key, part, module)
    try:
        return getattr(found, name)
    except AttributeError:
        raise _build_error(
            key, part, f"the module {module} has no {name}; name something that the module has"
        ) from None
    # Any error is possible here, because the module may compute its attributes.
    except (Exception, SystemExit) as error:
        raise _build_error(
            key, part, f"looking up the name in the module failed with {_describe_error(error)}; correct the module"
        ) from error


def _import_module(key: str, part: Imported, name: str) -> ModuleType:
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            cure = "install its package, or put the folder that holds it into PYTHONPATH"
            raise _build_error(key, part, f"there is no module {error.name} on this machine; {cure}") from None
        raise _build_error(
            key, part, f"importing {name} failed with {_describe_error(error)}; install the missing module"
        ) from error
    except (Exception, SystemExit) as error:  # importing a script may exit
        raise _build_error(
            key, part, f"importing {name} failed with {_describe_error(error)}; correct the module"
        ) from error
    _check_place(key, part, found)
    return found


def _check_place(key: str, part: Imported, module: ModuleType) -> None:
    """Reject a user-defined module that was found by a relative path in PYTHONPATH.

    Other processes of the run have other working directories and would not find the module.
    """
    file = Path(getattr(module, "__file__", None) or os.devnull)
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    for entry in entries:
        if not os.path.isabs(entry) and Path(entry).resolve() in file.resolve().parents:
            cure = f"write PYTHONPATH={Path(entry).resolve()}"
            raise _build_error(
                key,
                part,
                f"the module is found by the relative path PYTHONPATH = {entry!r}, which other processes of the "
                f"run cannot find; {cure}",
            )


def read_return_type(function: Callable[..., Any]) -> Any:
    """Return a function's return annotation, or None if there is none or it cannot be evaluated."""
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # noqa: BLE001 - only a type checker can read these annotations
        return None


def _build_error(key: str, part: Imported, why: str) -> ConfigError:
    return ConfigError(f"{key}.path = {part.path!r}: {why}")


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
