"""Starts the worker processes of an environment (the guest) as a script: `python boot.py FD`. FD is the file descriptor
of the control socket.

The interpreter may have no rollflow installed, and must not import rollflow's other packages. During the import of the
guest's modules, empty modules replace the packages that contain the guest. After the import, the empty modules are
removed, so that an environment can import an installed rollflow.
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
    sys.path.pop(0)  # remove this script's folder, whose modules could hide the user's modules
    import_keeper().run(int(sys.argv[1]))
