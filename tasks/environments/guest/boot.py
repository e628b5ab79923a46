"""Starts the guest as a script: `python boot.py FD`, where FD is the file descriptor of the control socket.

The interpreter may have no rollflow, and must not import rollflow's other packages. While the guest's modules are
imported, empty modules stand for the packages around the guest. Afterwards they are removed, so that an environment can
import a rollflow that is installed.
"""

from __future__ import annotations

import sys
import types
from importlib import import_module
from pathlib import Path

PACKAGE = "rollflow.tasks.environments.guest"


def import_keeper() -> types.ModuleType:
    """Import the keeper without the packages around the guest."""
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
    sys.path.pop(0)  # the folder of this script, whose modules must not hide the user's
    import_keeper().run(int(sys.argv[1]))
