"""Programs that try to pass tests by other means than right answers, each with a test case that it must fail."""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import indent
from typing import Any

CALL = {"call": "f", "args": [2], "expected": "a right answer"}
ASSERT = {"assert": "assert f(2) == 'a right answer'"}
PRINT = {"stdin": "2", "stdout": "a right answer"}
CHECK = {"stdin": "2", "checker": "assert open('output.txt').read() == 'a right answer'"}
PYTEST = {"pytest": "from solution import f\n\ndef test_f():\n    assert f(2) == 'a right answer'\n"}
FORMS: dict[str, dict[str, Any]] = {"call": CALL, "assert": ASSERT, "print": PRINT, "checker": CHECK, "pytest": PYTEST}

CHANNEL = """
import json, os, socket, sys, time
c = socket.socket(fileno=3)
def send(text):
    c.sendall(text.encode() if isinstance(text, str) else text)
"""
NAMES = """send('{"f": {"remote": 0}, "g": {"remote": 1}}\\n')\n"""


@dataclass(frozen=True)
class Forgery:
    """A program, and the test case that it tries to pass without a right answer."""

    name: str
    code: str
    case: dict[str, Any]


def write_pytest_case(case: dict[str, Any]) -> dict[str, Any]:
    """Return a test case with assertions as a pytest file, and `PYTEST` for any other test case."""
    if "assert" not in case:
        return PYTEST
    return {"pytest": f"from solution import f\n\ndef test_f():\n{indent(case['assert'], '    ')}\n"}


def _answer(name: str, answer: str, case: dict[str, Any] = CALL) -> Forgery:
    return Forgery(name, f"{CHANNEL}{NAMES}while True:\n    if not c.recv(9999): break\n    send({answer})", case)


FORGERIES = (
    Forgery("own abs", "def abs(x): return 0\ndef f(x): return 9", {"assert": "assert abs(f(2) - 4) < 1e-6"}),
    Forgery("own all", "def all(x): return True\ndef f(x): return 9", {"assert": "assert all([f(2) == 4])"}),
    Forgery("own sorted", "def sorted(x): return [4]\ndef f(x): return [9]", {"assert": "assert sorted(f(2)) == [4]"}),
    Forgery("own equal", "def equal(*x): return True\ndef f(x): return 9", CALL),
    Forgery("own error", "AssertionError = ValueError\ndef f(x): return 9", {"assert": "assert f(2) == 4"}),
    Forgery(
        "own builtins",
        CHANNEL + 'send(\'{"f": {"remote": 0}, "__builtins__": {"dict": [["abs", {"remote": 1}]]}}\\n\')\n'
        "while c.recv(9999): send('{\"value\": 0}\\n')",
        {"assert": "x = f(2)\nassert abs(x - 4) < 1e-6"},
    ),
    Forgery("own module", "math = f = lambda x: 9", {"assert": "import math\nassert math.isclose(f(2), 4)"}),
    Forgery("loop that ends early", "def f(x): raise StopIteration", {"assert": "assert all(map(f, [1, 2]))"}),
    Forgery(
        "attribute that is false",
        "class A:\n    done = False\ndef f(x): return A()",
        {"assert": "assert f(2).done"},
    ),
    _answer("error that ends the tests", '\'{"error": "SystemExit", "text": 0}\\n\''),
    _answer("error that is no error", '\'{"error": "print", "text": 0}\\n\''),
    _answer("error that interrupts", '\'{"error": "KeyboardInterrupt"}\\n\''),
    _answer("no JSON", "'x' * 100 + '\\n'"),
    _answer("no value", "'{}\\n'"),
    _answer("not an object", '\'["error", "value"]\\n\''),
    _answer("unknown kind", '\'{"value": {"exec": "1"}}\\n\''),
    _answer("not a number", "'{\"value\": NaN}\\n'"),
    _answer("infinite", "'{\"value\": Infinity}\\n'", {"call": "f", "args": [2], "expected": 4, "tolerance": 1e9}),
    _answer("deep value", "'{\"value\": ' + '[' * 100000 + ']' * 100000 + '}\\n'"),
    _answer("long number", "'{\"value\": ' + '9' * 100000 + '}\\n'"),
    _answer("many values", "'{\"value\": [' + '0,' * 3000000 + '0]}\\n'"),
    _answer("remote of everything", '\'{"value": {"remote": {"remote": 0}}}\\n\''),
    _answer("not a text", "b'\\xff\\xfe\\x00\\n'"),
    _answer("many answers", "'{\"value\": 9}\\n' * 1000"),
    Forgery("endless line", CHANNEL + "while True: send('x' * 65536)", CALL),
    Forgery("endless answers", CHANNEL + NAMES + "while True: send('{\"value\": 9}\\n')", CALL),
    Forgery("drips", CHANNEL + "while True:\n    send(' '); time.sleep(0.01)", CALL),
    Forgery("closed channel", CHANNEL + NAMES + "c.shutdown(2); os.close(3); time.sleep(600)", CALL),
    Forgery("half-closed channel", CHANNEL + NAMES + "c.shutdown(1)\nwhile c.recv(999): pass\ntime.sleep(600)", CALL),
    Forgery(
        "descriptors over the channel",
        CHANNEL
        + "try:\n    while True: socket.send_fds(c, [b' '], [0, 1, 2, 3])\nexcept OSError: pass\n"
        + NAMES
        + "time.sleep(600)",
        CALL,
    ),
    Forgery(
        "keeper's limits",
        "import resource\nfor which in range(16):\n    try: resource.prlimit(1, which, (0, 0))\n"
        "    except OSError: pass\ndef f(x): return 9",
        CALL,
    ),
    Forgery("child that answers", CHANNEL + NAMES + "if os.fork(): os._exit(0)\nsend('{\"value\": 4}\\n')", CALL),
    Forgery("quotes", "x = '''\"\"\"'''\n')\nraise SystemExit(0)\n('", CALL),
    Forgery("surrogates", "x = '\ud800'\ndef f(x): return 9", CALL),
    Forgery("NUL", "x = 1\0\nraise SystemExit(0)", CALL),
    Forgery(
        "memory of the tests", "import gc\ndef f(x):\n    return [o for o in gc.get_objects() if type(o) is str]", CALL
    ),
)
