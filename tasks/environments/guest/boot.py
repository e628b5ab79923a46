"""Starts the worker processes of an environment. The module is a script: `python boot.py FD`, where FD is the file
descriptor of the control socket.

The interpreter may have no rollflow installed, so modules are imported without rollflow's other packages. During the
import, empty modules replace the packages that contain `guest`.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from pathlib import Path

PACKAGE = "rollflow.tasks.environments.guest"


def import_keeper() -> types.ModuleType:
    """Import the module `keeper` without importing the packages that contain it."""
    folder = Path(__file__).resolve().parent
    names = PACKAGE.split(".")
    outer = [".".join(names[: count + 1]) for count in range(len(names))]
    for name in outer:
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)] if name == PACKAGE else []
    keeper = import_module(PACKAGE + ".keeper")
    for name in outer:
        del sys.modules[name]
    return keeper


if __name__ == "__main__":
    sys.path.pop(0)  # this script's folder is removed, because its modules could hide the user's modules
    import_keeper().run(int(sys.argv[1]))
