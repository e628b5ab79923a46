"""Implements `rollflow check RECIPE`, which checks a recipe without starting a run. The command rejects every recipe
that `rollflow run` would reject, with the same message, and prints a note for each check that was skipped. Another note
says whether asynchronous training saves time on the run's machines. Nothing is downloaded; with `--offline`, no service
is contacted.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Iterator

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.config import load_recipe
from rollflow.flows.keepalive.overlap import advise_alpha, find_overlap, machines_of, read_machine
from rollflow.flows.preflight import preflight
from rollflow.flows.ray_cluster import cluster
from rollflow.tasks.run.config import RunConfig


def command(options: argparse.Namespace) -> int:
    """Check the recipe, and print the result or the complete configuration with all defaults."""
    config = load_recipe(options.recipe, options.set)
    tell = functools.partial(print, file=sys.stderr, flush=True)
    found = preflight(config, download=False, ask=not options.offline, tell=tell)
    if options.json:
        print(json.dumps(config.model_dump(mode="json")))
        return OK
    if options.resolved:
        print(to_toml(config.model_dump(mode="json")), end="")
        return OK
    print(
        f"{options.recipe}: good. {config.versions} versions of {config.groups} groups x {config.group_size} "
        f"responses, async_ratio {config.async_ratio:g}, engine {config.engine.kind}, learner {config.train.kind}"
    )
    for note in found.notes:
        print(note)
    for note in _advise(config, ask=not options.offline):
        print(note)
    return OK


def _advise(config: RunConfig, *, ask: bool) -> Iterator[str]:
    """Yield a note that says whether asynchronous training saves time on the run's machines. Yield no note if the run
    uses another Ray cluster and no service may be contacted.
    """
    if config.cluster.address == "auto":
        yield advise_alpha(config, find_overlap(config, [read_machine()]))
    elif ask:
        with cluster.attached_cluster(config.cluster.address, "check"):
            machines = machines_of(config, cluster.living_nodes())
        yield advise_alpha(config, find_overlap(config, machines))
