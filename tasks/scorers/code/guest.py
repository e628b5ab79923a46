"""The program that runs in both sandboxes of a case. In one sandbox it runs the model's program, and in the other one
the tests.

    tests  --call of a function, as JSON--> candidate, in a sandbox of its own
           <---value or error, as JSON-----

So a program can neither read the tests nor decide their verdict: it only answers calls. Values of the basic types are
copied; an operator such as == then works on the copy. Other objects stay with the candidate, and the tests get a
`Remote`, which forwards calls of methods.

This file imports only the standard library. Its text is the start of the programs that `cases` gives to the sandboxes.
"""

from __future__ import annotations

import builtins
import json
import math
import os
import socket
import sys
import types
from functools import partial
from typing import Any, NoReturn

CHANNEL = 3  # descriptor of the socket between the two sandboxes
# return codes of tests without a channel: a call has no answer yet; a call differs from the call of the previous run
ASKS, DIFFERS = 75, 76
DEEPEST = 100  # most levels of nested values
LONGEST_TEXT = 500  # most characters of an error's text
PLAIN = (type(None), bool, int, str)
ATTRIBUTE = "__getattr__"  # the method that stands for reading an attribute
FORWARDED = ("__call__", "__getitem__", "__iter__", "__len__", "__next__", "__repr__", "__str__")


def encode(value: Any, keep: Any, depth: int = 0) -> Any:
    """Return a value as JSON; `keep` stores an object of another type and returns its number."""
    if depth > DEEPEST:
        raise ValueError("the value is nested too deeply")
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple, set, frozenset):
        parts = [encode(part, keep, depth + 1) for part in value]
        if kind in (set, frozenset):
            parts.sort(key=json.dumps)  # the order of a set differs from process to process
        return parts if kind is list else {kind.__name__: parts}
    if kind is dict:
        pairs = [[encode(key, keep, depth + 1), encode(part, keep, depth + 1)] for key, part in value.items()]
        return {"dict": pairs}
    if kind in (bytes, bytearray):
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    bases: tuple[Any, ...] = (int, float, str, list, tuple, set, frozenset, dict)
    for base in bases:
        if isinstance(value, base):
            return encode(base(value), keep, depth + 1)
    return {"remote": keep(value)}


def decode(value: Any, remote: Any) -> Any:
    """Return the value from the JSON that `encode` wrote; `remote` returns the object that has a given number."""
    if isinstance(value, list):
        return [decode(part, remote) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {decode(key, remote): decode(part, remote) for key, part in content}
    if kind == "bytes":
        return bytes.fromhex(content)
    if kind == "complex":
        return complex(*content)
    if kind == "remote":
        return remote(content)
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](decode(part, remote) for part in content)


def open_channel() -> Any:
    """Return the channel between the sandbox of the program and the sandbox of the tests."""
    return socket.socket(fileno=CHANNEL).makefile("rwb")


class Script:
    """Replaces the channel of a program in a sandbox without one. It gives the program known calls, and prints only the
    last answer.
    """

    def __init__(self, calls: list[str]) -> None:
        self._calls = calls
        self._answer = b""

    def __iter__(self) -> Any:
        return iter(self._calls)

    def write(self, data: bytes) -> None:
        """Keep an answer."""
        self._answer = data

    def flush(self) -> None:
        """Do nothing."""

    def print_answer(self) -> None:
        """Print the last answer as the last line."""
        sys.stdout.flush()
        os.write(1, b"\n" + self._answer)


class Recording:
    """Replaces the channel of tests in a sandbox without one. It gives recorded answers, and ends the process at the
    first call without an answer.

    `calls` are the calls that were answered; the first answer is for no call, as it lists the program's names.
    """

    def __init__(self, calls: list[str], answers: list[str]) -> None:
        self._calls, self._answers = iter(calls), iter(answers)
        self._call = ""

    def write(self, data: bytes) -> None:
        """Keep a call."""
        self._call = data.decode().rstrip("\n")

    def flush(self) -> None:
        """Do nothing."""

    def readline(self) -> str:
        """Return the answer of the call, or print the call and end this process."""
        answer = next(self._answers, None)
        if answer is None:
            sys.stdout.flush()
            os.write(1, f"\n{self._call}\n".encode())
            os._exit(ASKS)
        if self._call and next(self._calls) != self._call:
            os._exit(DIFFERS)
        return answer


def answer_calls(code: str, name: str, calls: list[str]) -> None:
    """Run the model's program and all these calls; print the last answer, or without a call the program's names."""
    script = Script(calls)
    serve_candidate(code, name, script)
    script.print_answer()


def serve_candidate(code: str, name: str, channel: Any = None) -> None:
    """Run the model's program as the module `solution`, then answer calls of its functions until the tests end."""
    channel = channel or open_channel()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    exec(compile(code, name, "exec", dont_inherit=True), module.__dict__)
    kept: list[Any] = []

    def keep(value: Any) -> int:
        kept.append(value)
        return len(kept) - 1

    public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
    channel.write(json.dumps({key: encode(value, keep) for key, value in public.items()}).encode() + b"\n")
    channel.flush()
    for line in channel:
        asked = json.loads(line)
        try:
            kept_object, method = kept[asked["object"]], asked["method"]
            target = partial(getattr, kept_object) if method == ATTRIBUTE else getattr(kept_object, method)
            args, named = decode(asked["args"], kept.__getitem__), decode(asked["named"], kept.__getitem__)
            answer = {"value": encode(target(*args, **named), keep)}
        except BaseException as error:  # noqa: BLE001 - the tests get every error of the program
            names = [base.__name__ for base in type(error).__mro__ if hasattr(builtins, base.__name__)]
            answer = {"error": names[0], "text": str(error)[:LONGEST_TEXT]}
        channel.write(json.dumps(answer).encode() + b"\n")
        channel.flush()


class Remote:
    """An object in the candidate's sandbox."""

    def __init__(self, channel: Any, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self._channel, self._number, ATTRIBUTE, (name,), {})


def forward(name: str) -> Any:
    """Return a special method that calls the method of the same name on the candidate's object."""
    return lambda self, *args, **named: ask(self._channel, self._number, name, args, named)


for special in FORWARDED:
    setattr(Remote, special, forward(special))


def ask(channel: Any, number: int, method: str, args: Any, named: Any) -> Any:
    """Call a method of a candidate's object; raise its error as a built-in error."""

    def refer(value: Any) -> int:
        if isinstance(value, Remote):
            return int(value._number)
        raise TypeError(f"a {type(value).__name__} cannot be given to the program")

    sent = {"object": number, "method": method, "args": encode(list(args), refer), "named": encode(named, refer)}
    channel.write(json.dumps(sent).encode() + b"\n")
    channel.flush()
    line = channel.readline()
    if not line:
        raise SystemExit("the program has ended")
    answer = json.loads(line)
    if "error" in answer:
        kind = getattr(builtins, str(answer["error"]), RuntimeError)
        ends = kind is StopIteration and method != "__next__"  # it would end a loop of the tests early
        usable = isinstance(kind, type) and issubclass(kind, Exception) and not ends
        raise (kind if usable else RuntimeError)(answer.get("text", ""))
    return decode(answer["value"], lambda other: Remote(channel, other))


def run_tests(tests: str, entry: str, channel: Any = None) -> NoReturn:
    """Run tests on the candidate's functions, and exit with 0 if all pass.

    The tests see the functions by their names, as the module `solution`, and the function `entry` as `candidate`. A
    name of Python's own is the program's only if it is `entry`: the tests' `abs` or `all` decides whether they pass.
    """
    channel = channel or open_channel()
    line = channel.readline()
    if not line:
        raise SystemExit("the program has ended before its tests")
    names = {name: value for name, value in json.loads(line).items() if name == entry or is_usable(name)}
    found = {name: decode(value, lambda number: Remote(channel, number)) for name, value in names.items()}
    module = types.ModuleType("solution")
    module.__dict__.update(found)
    sys.modules["solution"] = module
    space = {**found, "__name__": "tests", "equal": equal}
    if entry:
        if entry not in found:
            raise SystemExit(f"the program defines no {entry}")
        space["candidate"] = found[entry]
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), space)
    raise SystemExit(0)


def is_usable(name: str) -> bool:
    """Return True if a program may define this name for its tests."""
    return name.isidentifier() and not name.startswith("_") and not hasattr(builtins, name)


def equal(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compare two values; a tuple equals a list of the same values.

    Numbers may differ by `tolerance`, or by this share of the expected number. A share of the value would let a huge
    value equal every number.
    """
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(lambda a, b: equal(a, b, tolerance), value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(equal(value[key], expected[key], tolerance) for key in expected)
    if tolerance and isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return bool(abs(value - expected) <= tolerance * max(1, abs(expected)))
    return bool(value == expected)
