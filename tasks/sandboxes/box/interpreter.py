"""Runs Python source in a process that was forked from a Python interpreter with finished imports."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # unlike `signal`, it looks up no enumerations
import atexit
import builtins
import gc
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

ROOT = __file__.rpartition("/rollflow/")[0]
EXAMPLE = '{"command": [], "code": "", "arguments": [], "env": {}, "timeout": 1.0, "keep_children": false}'


def touch_memory() -> None:
    """Write to the memory that each program writes to, so that the kernel copies it before the request arrives."""
    json.loads(EXAMPLE)
    exec(compile("print(end='')", "main.py", "exec", dont_inherit=True), {})
    sys.stdout.flush()


def run_source(request: dict[str, Any]) -> NoReturn:
    """Execute the request's Python source as the module `__main__`, then exit this process."""
    if request["env"]:
        os.environ.update(request["env"])
    sys.argv = [request["name"], *request["arguments"]]
    sys.path[sys.path.index(ROOT)] = os.getcwd()
    main = type(sys)("__main__")
    main.__dict__.update(__file__=request["name"], __builtins__=builtins)
    sys.modules["__main__"] = main
    _signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.freeze()  # without this, the next object would start a garbage collection, which writes to all objects
    gc.enable()
    code = 1
    try:
        try:
            exec(compile(request["code"], request["name"], "exec", dont_inherit=True), main.__dict__)
            code = 0
        except SystemExit as error:
            code = return_code(error)
        except BaseException as error:  # noqa: BLE001 - as the interpreter itself does
            shown = error.__traceback__.tb_next if error.__traceback__ else None
            traceback.print_exception(type(error), error, shown)
        code = finish(code)
    finally:
        os._exit(code & 255)


def return_code(error: SystemExit) -> int:
    """Return the exit code of a `SystemExit`; a text is printed to stderr first."""
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    print(error.code, file=sys.stderr)
    return 1


def finish(code: int) -> int:
    """Shut the program down as Python does: join threads, run exit functions, flush output."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            code = code or 120
    return code
