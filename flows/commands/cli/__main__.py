"""Lets `python -m rollflow.flows.commands.cli` run the same program as `rollflow`."""

import sys

from rollflow.flows.commands.cli import main

code = main()
# An interrupt during an earlier `exec` leaves a flag that would end this process by SIGINT; `exec` clears the flag.
exec("")
sys.exit(code)
