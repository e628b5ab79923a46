"""Implements `rollflow compare`, which compares the configurations, results and costs of runs in a table and on an HTML
page.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.locations import find_run, newest_runs, run_home
from rollflow.flows.views.compare import ComparedRun, describe_same_weights, diff_configs, read_compared
from rollflow.flows.views.compare_page import compare_page
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.context import RunContext


def command(options: argparse.Namespace) -> int:
    """Compare the runs: print a table, and write an HTML page."""
    named = [find_run(run, options.store) for run in options.runs]
    contexts = named or newest_runs(options.store, 2)
    _check_apart(contexts)
    runs = read_compared(contexts)
    page = options.html or run_home() / "compare.html"
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(compare_page(runs))
    except OSError as error:
        raise ConfigError(f"--html {str(page)!r} cannot be written: {error.strerror}; give another file") from None
    if options.json:
        shared = {"differences": diff_configs(runs), "weights": describe_same_weights(runs), "page": str(page)}
        print(json.dumps({"runs": [_to_json(run) for run in runs], **shared}))
    else:
        Console(highlight=False).print(compared_table(runs))
        for line in describe_same_weights(runs):
            print(line)
        print(f"page: {page}")
    return OK


def _check_apart(contexts: Sequence[RunContext]) -> None:
    keys = [context.key for context in contexts]
    for context in contexts:
        if keys.count(context.key) > 1:
            raise ConfigError(f"run {context.run_id!r} is named twice; name each run once")


def compared_table(runs: Sequence[ComparedRun]) -> Table:
    """Build a table that compares runs, with one column for each run. The first rows contain the configuration keys
    that differ, and the other rows the results and costs.
    """
    table = Table(title=f"{len(runs)} runs", title_justify="left", box=SIMPLE)
    table.add_column("", overflow="fold", min_width=20)
    for run in runs:
        table.add_column(run.name, overflow="fold")
    columns: list[Sequence[Mapping[str, str]]] = [[run.result for run in runs], [run.cost for run in runs]]
    columns.append([{f"{stage} idle": share for stage, share in run.idle.items()} for run in runs])
    for key, values in diff_configs(runs).items():
        table.add_row(key, *values)
    for part in columns:
        table.add_section()
        for name in dict.fromkeys(name for column in part for name in column):
            table.add_row(name, *(column.get(name, "") for column in part))
    return table


def _to_json(run: ComparedRun) -> dict[str, object]:
    curves = {
        name: {part: getattr(curve, part).tolist() for part in ("versions", "tokens", "seconds", "values")}
        for name, curve in run.curves.items()
    }
    return {"name": run.name, "result": run.result, "cost": run.cost, "idle": run.idle, "curves": curves}
