"""Sets the limits and the file descriptors of a sandboxed program, and then becomes the program.

This file runs as `python -S program.py ORDER`, where `ORDER` is a JSON file that describes the program. Only the
standard library is imported, because a confined program can read no other modules.
"""

from __future__ import annotations

import json
import os
import resource
import struct
import sys
import traceback
from typing import Any

NOT_STARTED = 127  # exit code for a command that does not exist, as in a shell
PR_SET_SECCOMP, FILTER, PR_SET_NO_NEW_PRIVS = 22, 2, 38
CHANNEL = 3  # file descriptor of the socket `Program.channel`


def main() -> None:
    """Replace this process by the program that the JSON file `ORDER` describes."""
    with open(sys.argv[1], "rb") as file:
        order = json.load(file)
    if order["channel"]:  # the channel arrives as stdin, because sandlock passes only file descriptors 0, 1 and 2
        os.dup2(0, CHANNEL, inheritable=True)
    stdin = os.open(order["stdin"], os.O_RDONLY)
    os.dup2(stdin, 0, inheritable=True)
    os.close(stdin)
    name = " ".join(order["command"][:1]) or order["name"]
    try:
        set_limits(order)
        os.chdir(order["cwd"])
        if order["filter"]:
            install_filter(bytes.fromhex(order["filter"]))
        if order["command"]:
            os.execvp(order["command"][0], order["command"])
    except (OSError, ValueError) as error:
        os.write(2, f"{name}: {error}\n".encode())
        os._exit(NOT_STARTED)
    run_source(order)


def set_limits(order: dict[str, Any]) -> None:
    """Set the resource limits of this process (setrlimit)."""
    for which, most in (
        # a coarse limit; the supervising process enforces the exact memory limit
        (resource.RLIMIT_AS, 2 * order["memory_bytes"] + 2**29),
        (resource.RLIMIT_NOFILE, order["open_files"]),
        (resource.RLIMIT_FSIZE, order["folder_bytes"]),
        (resource.RLIMIT_CPU, int(order["timeout"] * (os.cpu_count() or 1)) + 2),  # the program may use all cores
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def install_filter(program: bytes) -> None:
    """Install a seccomp filter for this process and its children, in addition to the filter of sandlock."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    kept = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(kept))
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(PR_SET_SECCOMP, FILTER, header, 0, 0):
        raise OSError(ctypes.get_errno(), "the seccomp filter of system calls could not be installed")


def run_source(order: dict[str, Any]) -> None:
    """Execute Python source as the module `__main__` of this process."""
    sys.argv = [order["name"], *order["arguments"]]
    sys.path.insert(0, os.getcwd())
    main_module = type(sys)("__main__")
    main_module.__dict__.update(__file__=order["name"], __builtins__=__builtins__)
    sys.modules["__main__"] = main_module
    import random

    random.seed(0)  # equal seeds, so that repeated runs draw the same random numbers
    try:
        exec(compile(order["code"], order["name"], "exec", dont_inherit=True), main_module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - as the interpreter itself does
        shown = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, shown)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
