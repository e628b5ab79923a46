"""`python -m rollflow.flows.commands.cli`: the same as `rollflow`."""

import sys

from rollflow.flows.commands.cli import main

code = main()
# If an interrupt arrived while a library executed a string of code (as dataclasses do), the interpreter keeps a
# flag even after the interrupt was caught, and `python -m` would end by SIGINT whatever the exit code. Executing
# another string clears the flag.
exec("")
sys.exit(code)
