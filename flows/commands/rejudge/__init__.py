"""Implements `rollflow rejudge`, which scores the stored responses of a run again with the current scorers, and prints
which scores would change. The option `--set reward.KEY=VALUE` changes a scorer. Nothing is written to the run's
storage.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.commands.cli.progress_line import show_progress
from rollflow.flows.commands.rejudge.report import build_value, print_report
from rollflow.flows.config import override_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.config_changes import tree_of
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.rejudge import RejudgeReport, Rejudging
from rollflow.tasks.run.user_code import check_own_parts
from rollflow.tasks.scorers.base_config import RewardBase

KIND = re.compile(r"\s*(reward|rewards\.([\w-]+))\.kind\s*=\s*[\"']?([\w-]+)")


def command(options: argparse.Namespace) -> int:
    """Score stored responses again, and print which scores have changed. Return `FAILED` if a score has changed, or if
    a response or a batch could not be scored again.
    """
    context = chosen_run(options)
    versions = select_versions(context, options)
    config = choose_config(context.config, options.set)
    check_own_parts(config)
    report = RejudgeReport(context.run_id, options.show)
    with show_progress("reading responses") as tell:
        rejudging = Rejudging(context, config)
        asyncio.run(rejudging.run(versions, report, lambda *far: tell(_describe_progress(versions, *far))))
    if options.json:
        print(json.dumps(build_value(context, config, report)))
    else:
        print_report(context, config, report)
    return OK if report.is_same else FAILED


def select_versions(context: RunContext, options: argparse.Namespace) -> Sequence[int]:
    """Return the policy versions whose training batches are scored again.

    Raises:
        ConfigError: the run has no such policy version.
    """
    newest = context.policies.newest()
    if newest < 1:
        raise ConfigError(
            f"run {context.run_id!r}: no policy version has been trained yet; there is nothing to judge again"
        )
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
            f"VERSION = {version}: run {context.run_id!r} has not trained this version; give a version from 1 to "
            f"{newest}"
        )
    return [version]


def choose_config(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return the run's configuration, with the changes to its scorers that the user has given by `--set`.

    If the user changes the kind of a scorer, the scorer keeps only the keys that all kinds of scorers have.

    Raises:
        ConfigError: a given key does not belong to a scorer, or its value is invalid.
    """
    tree: dict[str, Any] = tree_of(config)
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not key.startswith(("reward.", "rewards.")):
            raise ConfigError(
                f"--set {override}: here only keys of [reward] and [rewards.NAME] can be set, because they decide "
                "scores; leave this one out"
            )
        if found := KIND.match(override):
            _change_kind(tree, found[2], found[3])
    return override_config(tree, overrides) if overrides else config


def _change_kind(tree: dict[str, Any], name: str | None, kind: str) -> None:
    """Remove the configuration keys that only the former kind of a scorer has."""
    sections, key = (tree, "reward") if name is None else (tree["rewards"], name)
    section: Mapping[str, Any] = sections.get(key) or {}
    if section.get("kind") != kind:
        sections[key] = {name: value for name, value in section.items() if name in RewardBase.model_fields}


def _describe_progress(versions: Sequence[int], version: int, responses: int, scored: int) -> str:
    place = versions.index(version) + 1
    return f"judging version {version} ({place} of {len(versions)}): {scored} of {responses} responses"
