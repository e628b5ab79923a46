"""The command line: reads the options, runs the verb, turns errors into one sentence on standard error.

Importing this module loads no torch, Ray, vLLM, Prefect or MLflow: each verb's module imports what it needs.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from rollflow.flows.commands import BAD_INPUT, FAILED
from rollflow.flows.commands.options import parser
from rollflow.storage.errors import ConfigError, RollflowError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb: `command(options)` of its module. Returns the exit code."""
    options = parser().parse_args(arguments)
    try:
        return int(importlib.import_module(f"rollflow.flows.commands.{options.verb}").command(options))
    except ConfigError as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return BAD_INPUT
    except RollflowError as error:
        print(f"rollflow: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rollflow: stopped", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
