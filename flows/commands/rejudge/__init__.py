"""Implements `rollflow rejudge`: judges the stored responses of a run again with the scorers of today, and prints which
verdicts would change.

The command writes nothing to the run. It starts the workers, and the sandboxes, that the run's scorers need, and ends
them. `--set reward.KEY=VALUE` judges with other scorers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.commands.rejudge.report import build_value, print_report
from rollflow.flows.config import override_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.rejudge import Progress, RejudgeReport, Rejudging
from rollflow.tasks.run.user_code import check_own_parts
from rollflow.tasks.scorers.base_config import RewardBase

LINE_SECONDS = 10.0  # seconds between two lines of progress, if the output is no terminal
KIND = re.compile(r"\s*(reward|rewards\.([\w-]+))\.kind\s*=\s*[\"']?([\w-]+)")


def command(options: argparse.Namespace) -> int:
    """Judge responses again, and print what has changed. Return `FAILED` if a verdict has changed, or if a response or
    a batch could not be judged again.
    """
    context = chosen_run(options)
    versions = select_versions(context, options)
    config = choose_config(context.config, options.set)
    check_own_parts(config)
    report = RejudgeReport(context.run_id, options.show)
    with _show_progress(versions) as progress:
        asyncio.run(Rejudging(context, config).run(versions, report, progress))
    if options.json:
        print(json.dumps(build_value(context, config, report)))
    else:
        print_report(context, config, report)
    return OK if report.is_same else FAILED


def select_versions(context: RunContext, options: argparse.Namespace) -> Sequence[int]:
    """Return the versions whose batches are judged again.

    Raises:
        ConfigError: the run has no such version.
    """
    newest = context.policies.newest()
    if newest < 1:
        raise ConfigError(f"run {context.run_id!r}: no version has been trained yet; there is nothing to judge again")
    if options.all:
        return range(1, newest + 1)
    if options.last is not None:
        return range(max(1, newest - options.last + 1), newest + 1)
    if options.version is None:
        return [newest]
    if not re.fullmatch(r"[0-9]+", options.version):
        raise ConfigError(f"VERSION = {options.version!r}: give a whole number")
    version = int(options.version)
    if not 0 < version <= newest:
        raise ConfigError(
            f"version {version} was trained on no batch; run {context.run_id!r} has versions 1 to {newest}"
        )
    return [version]


def choose_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the run's config with the scorers' keys that the user has set.

    A scorer of another kind keeps the keys that all kinds have.

    Raises:
        ConfigError: a key is not a scorer's key, or its value is wrong.
    """
    tree: dict[str, Any] = tree_of(config)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith(("reward.", "rewards.")):
            raise ConfigError(f"--set {override}: only keys of [reward] and [rewards.NAME] decide scores; leave it out")
        if found := KIND.match(override):
            _change_kind(tree, found[2], found[3])
    return override_config(tree, overrides) if overrides else config


def _change_kind(tree: dict[str, Any], name: str | None, kind: str) -> None:
    """Remove the keys that only the former kind of a scorer has."""
    sections, key = (tree, "reward") if name is None else (tree["rewards"], name)
    section: Mapping[str, Any] = sections.get(key) or {}
    if section.get("kind") != kind:
        sections[key] = {name: value for name, value in section.items() if name in RewardBase.model_fields}


@contextmanager
def _show_progress(versions: Sequence[int]) -> Iterator[Progress]:
    """Show the progress on standard error: as one changing line on a terminal, otherwise as a line now and then."""
    console = Console(stderr=True, highlight=False)

    def describe(version: int, responses: int, scored: int) -> str:
        return (
            f"version {version} ({versions.index(version) + 1} of {len(versions)}): {scored} of {responses} responses"
        )

    if console.is_terminal:
        with console.status("reading responses") as line:
            yield lambda *far: line.update(f"judging {describe(*far)}")
    else:
        yield _print_now_and_then(describe)


def _print_now_and_then(describe: Callable[[int, int, int], str]) -> Progress:
    last = time.monotonic()

    def progress(version: int, responses: int, scored: int) -> None:
        nonlocal last
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            print(f"judging {describe(version, responses, scored)}", file=sys.stderr, flush=True)

    return progress
