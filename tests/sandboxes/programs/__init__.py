"""Lists all hostile programs. If a program reaches something forbidden, it prints `ESCAPED` and what it reached."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile
from tests.sandboxes.programs.files import FILES
from tests.sandboxes.programs.kernel import KERNEL
from tests.sandboxes.programs.memory import MEMORY
from tests.sandboxes.programs.network import NETWORK
from tests.sandboxes.programs.output import OUTPUT
from tests.sandboxes.programs.processes import PROCESSES
from tests.sandboxes.programs.python import PYTHON

PROGRAMS: tuple[Hostile, ...] = (*NETWORK, *FILES, *PROCESSES, *MEMORY, *OUTPUT, *KERNEL, *PYTHON)
