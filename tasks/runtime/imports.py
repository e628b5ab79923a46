"""Parts of a person's own, found by their import path: "my_package.rewards:score".

A run keeps the paths in its config, and its processes read that from storage. So what a path may name is narrow: a
function that says it returns what the part is to return, or a class that derives from the part's contract. No other
function of any installed package can be called by writing its name into a config.

Every process of a run imports the parts that it needs by itself: their package is installed there, or its folder is in
PYTHONPATH. On a cluster of several nodes, on each of them.
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


def imported_function(key: str, part: Imported, returns: type) -> Callable[..., Any]:
    """The function that `part` names; `key` is the section it stands in.

    Raises:
        ConfigError: there is none, or it is not annotated to return `returns`, or what it returns is to be awaited.
    """
    found = _attribute(key, part)
    if not (isinstance(found, FunctionType) and _returned(found) is returns):
        name = returns.__name__
        cure = f"write `-> {name}`, with `from {returns.__module__} import {name}`"
        raise _refused(key, part, f"it is no function that is annotated to return rollflow's {name}; {cure}")
    if _is_later(found):
        raise _refused(key, part, f"it is asynchronous, or yields; write one that returns its {returns.__name__}")
    return found


def imported_class(key: str, part: Imported, contract: type[T]) -> type[T]:
    """The class that `part` names; `key` is the section it stands in.

    Raises:
        ConfigError: there is none, or it does not derive from `contract`.
    """
    found = _attribute(key, part)
    if not isinstance(found, type) or contract not in found.__mro__[1:]:
        raise _refused(key, part, f"it is no class that derives from rollflow's {contract.__name__}")
    return found


def imported_object(key: str, part: Imported, contract: type[T], *, optional: str = "", **arguments: object) -> T:
    """What the class that `part` names makes of its options and these arguments; it may go without a method `optional`.

    Raises:
        ConfigError: there is no such class, it takes other options, or it lacks a method of `contract`.
    """
    found: Any = imported_class(key, part, contract)
    own = made(key, part, lambda: found(**arguments, **part.options))
    if not isinstance(own, found):
        raise _refused(key, part, f"it made a {type(own).__name__} of its options; let it make one of its own")
    for name, promised in vars(contract).items():
        left_out = name == optional and getattr(getattr(own, name), "__func__", None) is promised
        if isinstance(promised, FunctionType) and not name.startswith("_") and not left_out:
            _check_method(key, part, own, promised)
    return typing.cast(T, own)


def _check_method(key: str, part: Imported, own: object, promised: FunctionType) -> None:
    """One that is not there, or is called otherwise, would fail once for each answer of a run."""
    name = promised.__name__
    method = getattr(own, name)
    if getattr(method, "__func__", None) is promised:
        raise _refused(key, part, f"it has no {name}; write one, as {key}'s contract says")
    if inspect.iscoroutinefunction(promised) and not inspect.iscoroutinefunction(inspect.unwrap(method)):
        raise _refused(key, part, f"its {name} cannot be awaited; write `async def {name}`")
    _, *given = inspect.signature(promised).parameters
    try:
        inspect.signature(method).bind(*given)
    except (TypeError, ValueError) as error:
        raise _refused(key, part, f"its {name} takes other arguments than ({', '.join(given)}): {error}") from None


def made(key: str, part: Imported, make: Callable[[], T]) -> T:
    """What `make` gives; `ConfigError` where it fails, be it that it takes other options."""
    try:
        return make()
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{key}.options = {part.options!r}: {part.path} failed with {_said(error)}; give it options that it takes"
        ) from error


def code_of(key: str, part: Imported) -> str:
    """SHA-256 of the file that what `part` names is written in; empty where it is in none."""
    try:
        return sha256(Path(inspect.getsourcefile(_attribute(key, part)) or "").read_bytes()).hexdigest()
    except (OSError, TypeError):  # made by a program, or in an archive
        return ""


def _attribute(key: str, part: Imported) -> Any:
    module, _, name = part.path.partition(":")
    found = _module(key, part, module)
    try:
        return getattr(found, name)
    except AttributeError:
        raise _refused(key, part, f"the module {module} has no {name}; name something that it has") from None
    except (Exception, SystemExit) as error:  # a module may make its names when it is asked for them
        raise _refused(key, part, f"its module failed with {_said(error)}; correct it") from error


def _module(key: str, part: Imported, name: str) -> ModuleType:
    try:
        found = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            cure = "install its package, or put the folder that holds it into PYTHONPATH"
            raise _refused(key, part, f"there is no module {error.name} on this machine; {cure}") from None
        raise _refused(key, part, f"importing {name} failed with {_said(error)}; install that") from error
    except (Exception, SystemExit) as error:  # a script ends the process that imports it
        raise _refused(key, part, f"importing {name} failed with {_said(error)}; correct it") from error
    _check_place(key, part, found)
    return found


def _check_place(key: str, part: Imported, module: ModuleType) -> None:
    """The processes of a run have working directories of their own: a relative PYTHONPATH is none there."""
    file = Path(getattr(module, "__file__", None) or os.devnull)
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    for entry in entries:
        if not os.path.isabs(entry) and Path(entry).resolve() in file.resolve().parents:
            cure = f"write PYTHONPATH={Path(entry).resolve()}"
            raise _refused(
                key, part, f"it is found by PYTHONPATH = {entry!r}, which is another folder elsewhere; {cure}"
            )


def _returned(function: Callable[..., Any]) -> Any:
    try:
        return typing.get_type_hints(function).get("return")
    except Exception:  # noqa: BLE001 - annotations that only a type checker can read
        return None


def _is_later(function: FunctionType) -> bool:
    """Whether a call gives something that is still to be awaited or gone through."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    return any(is_kind(function) for is_kind in kinds)


def _refused(key: str, part: Imported, why: str) -> ConfigError:
    return ConfigError(f"{key}.path = {part.path!r}: {why}")


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
