"""`rollflow simulate RECIPE`: simulates a recipe on other hardware, or on that of a recorded run, in virtual time."""

from __future__ import annotations

import argparse

from rollflow.flows.commands import OK
from rollflow.flows.commands._prediction import compare
from rollflow.flows.config import load_hardware, load_recipe
from rollflow.flows.locations import find_run
from rollflow.flows.views.timelines.simulation import Outputs, run_simulation


def command(options: argparse.Namespace) -> int:
    """Simulate on the given hardware, or on hardware that fits a recorded run, and compare with that run."""
    config, outputs = load_recipe(options.recipe, options.set), Outputs.of(options.plot, options.json)
    if options.from_run is not None:
        compare(config, find_run(options.from_run, options.store), options.versions, outputs, options.save_hardware)
    else:
        run_simulation(config, load_hardware(options.hardware), options.versions, outputs)
    return OK
