"""The code that runs in both sandboxes of a test case: one runs the model's program, and the other runs the tests.

    tests  --call of a function, as JSON--> candidate, in a sandbox of its own
           <---value or error, as JSON-----

A program can neither read the tests nor decide their verdict, because it only answers calls. Values of the basic types
are copied to the tests, where operators such as == work on the copy. Objects of other types stay with the program, and
the tests get a `Remote`, which forwards method calls.

`guest.py` imports only the standard library, because its source code is the beginning of each program in a sandbox.
"""

from __future__ import annotations

import builtins
import json
import math
import operator
import os
import socket
import sys
import types
from threading import Lock
from typing import Any, NoReturn

CHANNEL = 3  # file descriptor of the socket between the two sandboxes of a test case
# exit code ASKS: the tests made a call whose answer is not recorded yet
# exit code DIFFERS: the tests, which were run again, made another call than the recorded one
ASKS, DIFFERS = 75, 76
DEEPEST = 100  # deepest nesting of values that the tests and the program may exchange
MOST_BITS = 10_000  # largest number of bits of an integer in decimal digits, of which Python reads at most 4,300
LONGEST_TEXT = 500  # largest number of characters of an error's text
PLAIN = (type(None), bool, int, str)
ATTRIBUTE = "__getattr__"  # the method name that means reading an attribute
# special methods that a `Remote` forwards, with the functions that call them
FORWARDED: dict[str, Any] = {
    "__bool__": bool,
    "__call__": operator.call,
    "__delitem__": operator.delitem,
    "__getitem__": operator.getitem,
    "__iter__": iter,
    "__len__": len,
    "__next__": next,
    "__repr__": repr,
    "__setattr__": setattr,
    "__setitem__": operator.setitem,
    "__str__": str,
}
FUNCTIONS = {**FORWARDED, ATTRIBUTE: getattr}
TURN = Lock()  # held by the test thread whose call the program is answering


def encode(value: Any, keep: Any, depth: int = 0) -> Any:
    """Return a value as JSON. `keep` stores an object that has no JSON form, and returns a number for it."""
    if depth > DEEPEST:
        raise ValueError("the value is nested too deeply to be sent")
    kind = type(value)
    if kind is int and value.bit_length() > MOST_BITS:
        return {"int": hex(value)}
    if kind in PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind in (list, tuple, set, frozenset):
        parts = [encode(part, keep, depth + 1) for part in value]
        if kind in (set, frozenset):
            parts.sort(key=json.dumps)  # sorted, because the order of a set differs between processes
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


def encode_or_keep(value: Any, keep: Any) -> Any:
    """Return a value as JSON; store a value that is nested too deeply, such as a list that contains itself."""
    try:
        return encode(value, keep)
    except ValueError:
        return {"remote": keep(value)}


def decode(value: Any, remote: Any) -> Any:
    """Return the value from JSON that `encode` wrote; `remote` returns the object with a given number."""
    if isinstance(value, list):
        return [decode(part, remote) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "float":
        return float(content)
    if kind == "int":
        return int(content, 16)
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
    """Replaces the program's channel to the tests in a sandbox without channels: gives the program the recorded calls,
    and prints the last answer.
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
        """Print the answer to the last call as the last line of the output."""
        sys.stdout.flush()
        os.write(1, b"\n" + self._answer)


class Recording:
    """Replaces the tests' channel to the program in a sandbox without channels: gives recorded answers, and ends the
    process at the first call without a recorded answer.

    `calls` are the calls that were answered. The first answer belongs to no call and lists the names that the program
    defines.
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
        """Return the recorded answer to the tests' call, or print the call and end this process."""
        answer = next(self._answers, None)
        if answer is None:
            sys.stdout.flush()
            os.write(1, f"\n{self._call}\n".encode())
            os._exit(ASKS)
        if self._call and next(self._calls) != self._call:
            os._exit(DIFFERS)
        return answer


def answer_calls(code: str, name: str, calls: list[str]) -> None:
    """Run the model's program and the calls in `calls`; print the last answer or, without calls, the names that the
    program defines.
    """
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
    channel.write(json.dumps({key: encode_or_keep(value, keep) for key, value in public.items()}).encode() + b"\n")
    channel.flush()
    for line in channel:
        asked = json.loads(line)
        try:
            call, target = FUNCTIONS[asked["method"]], kept[asked["object"]]
            args, named = decode(asked["args"], kept.__getitem__), decode(asked["named"], kept.__getitem__)
            answer = {"value": encode(call(target, *args, **named), keep)}
        except BaseException as error:  # noqa: BLE001 - the tests get every error of the program
            names = [base.__name__ for base in type(error).__mro__ if hasattr(builtins, base.__name__)]
            answer = {"error": names[0], "text": str(error)[:LONGEST_TEXT]}
        channel.write(json.dumps(answer).encode() + b"\n")
        channel.flush()


class Remote:
    """Stands for an object in the sandbox of the model's program."""

    def __init__(self, channel: Any, number: int) -> None:
        self.__dict__.update(_channel=channel, _number=number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask(self._channel, self._number, ATTRIBUTE, (name,), {})


def forward(name: str) -> Any:
    """Return a special method of `Remote`, which calls the same method of the object in the program's sandbox."""
    return lambda self, *args, **named: ask(self._channel, self._number, name, args, named)


for special in FORWARDED:
    setattr(Remote, special, forward(special))


def ask(channel: Any, number: int, method: str, args: Any, named: Any) -> Any:
    """Call a method of an object in the program's sandbox; raise the method's error as a built-in error."""

    def refer(value: Any) -> int:
        if isinstance(value, Remote):
            return int(value._number)
        raise TypeError(f"a {type(value).__name__} cannot be passed to the program; pass plain values")

    sent = {"object": number, "method": method, "args": encode(list(args), refer), "named": encode(named, refer)}
    with TURN:
        channel.write(json.dumps(sent).encode() + b"\n")
        channel.flush()
        line = channel.readline()
    if not line:  # the process exits, because a test could catch an error and pass
        sys.stderr.write("the program has ended\n")
        sys.stderr.flush()
        os._exit(1)
    answer = json.loads(line)
    if "error" in answer:
        kind = getattr(builtins, str(answer["error"]), RuntimeError)
        ends = kind is StopIteration and method != "__next__"  # a StopIteration would silently end a loop of the tests
        usable = isinstance(kind, type) and issubclass(kind, Exception) and not ends
        raise build_error(kind if usable else RuntimeError, answer.get("text", ""))
    return decode(answer["value"], lambda other: Remote(channel, other))


def build_error(kind: type[Exception], text: Any) -> Exception:
    """Build an error with a text. Groups of errors and errors of text encodings need further arguments."""
    for args in ((text,), (text, [RuntimeError(text)]), ("", b"", 0, 1, text), ("", "", 0, 1, text), ("", 0, 1, text)):
        try:
            return kind(*args)
        except TypeError:
            continue
    return RuntimeError(text)


def run_tests(tests: str, entry: str, channel: Any = None) -> NoReturn:
    """Run tests on the functions of the model's program; exit with 0 if all tests pass.

    The tests can call each function of the program by its name, or import it from the module `solution`. The function
    `entry` is also named `candidate`. Only `entry` may have the name of a built-in, so that a program cannot replace
    built-ins such as `abs` in the tests.
    """
    found = read_module(channel or open_channel(), lambda name: name == entry or is_usable(name))
    space = {**found, "__name__": "tests", "equal": equal}
    if entry:
        if entry not in found:
            raise SystemExit(f"the program does not define {entry}, which the tests need")
        space["candidate"] = found[entry]
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), space)
    raise SystemExit(0)


def read_module(channel: Any, is_kept: Any) -> dict[str, Any]:
    """Read the names that the model's program defines, make them the module `solution`, and return them. `is_kept`
    decides which names are kept.
    """
    line = channel.readline()
    if not line:
        raise SystemExit("the program ended before its tests began")
    names = {name: value for name, value in json.loads(line).items() if is_kept(name)}
    found = {name: decode(value, lambda number: Remote(channel, number)) for name, value in names.items()}
    module = types.ModuleType("solution")
    module.__dict__.update(found)
    sys.modules["solution"] = module
    return found


def is_usable(name: str) -> bool:
    """Return True if the model's program may define this name for the tests."""
    return is_public(name) and not hasattr(builtins, name)


def is_public(name: str) -> bool:
    """Return True if a name is that of a public object."""
    return name.isidentifier() and not name.startswith("_")


def equal(value: Any, expected: Any, tolerance: float = 0.0) -> bool:
    """Compare two values; a tuple equals a list of the same values.

    Two numbers may differ by `tolerance`, or by `tolerance` times the expected number. The tolerance is not relative to
    `value`, because otherwise a huge value would equal every number.
    """
    if isinstance(expected, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(value) == len(expected) and all(map(lambda a, b: equal(a, b, tolerance), value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(equal(value[key], expected[key], tolerance) for key in expected)
    if tolerance and isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        return bool(abs(value - expected) <= tolerance * max(1, abs(expected)))
    return bool(value == expected)
