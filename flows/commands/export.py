"""Implements `rollflow export`, which writes one policy version of a run as an ordinary Hugging Face model folder."""

from __future__ import annotations

import argparse

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.export import export
from rollflow.flows.locations import find_published


def command(options: argparse.Namespace) -> int:
    """Export one policy version of a run, and print how to serve the exported folder."""
    context = chosen_run(options)
    export(context, find_published(context, options.version), options.folder)
    dtype = context.config.policy.dtype
    print(
        f"version {options.version} of run {context.run_id} is in {options.folder} ({dtype}); serve it with that dtype:"
    )
    print(f"vllm serve {options.folder} --dtype {dtype}")
    return OK
