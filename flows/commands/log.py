"""Implements `rollflow log`, which prints the history of a run, one line for each entry of the run's log.

`rollflow log --processes` prints the text logs of the run's processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.commands.cli.process_log import print_process_log
from rollflow.flows.services.times import utc_time
from rollflow.flows.views.config_history import change_sentence
from rollflow.flows.views.pass_rates import list_rates
from rollflow.storage.log.configs import RecordedConfig
from rollflow.storage.log.entries import (
    BatchCommitted,
    BatchVoided,
    Claimed,
    ConfigChanged,
    Entry,
    EpochStarted,
    Pruned,
    RunCreated,
    VersionPublished,
    encode,
)
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.log.run_log import Log
from rollflow.tasks.run.context import RunContext

LOOK_SECONDS = 1.0  # Seconds between two reads of the log with `--follow`.
SHOWN = ("reward", "loss")  # Names of the metrics that the log shows for each policy version.


def command(options: argparse.Namespace) -> int:
    """Print the entries of the run's log, the text logs of the run's processes, or the pass rates of the run's
    questions.
    """
    if options.rates:
        print("\n".join(map(json.dumps, list_rates(chosen_run(options)))))
        return OK
    show = print_process_log if options.processes else print_log
    show(chosen_run(options), follow=options.follow, as_json=options.json)
    return OK


def print_log(context: RunContext, *, follow: bool, as_json: bool, console: Console | None = None) -> None:
    """Print every entry of the run's log. If `follow` is true, print new log entries until the user ends the command.

    Raises:
        ConfigError: the run does not exist.
        Missing, Corrupt: the log is damaged. The log entries before the damage have been printed.
    """
    console = console or Console(highlight=False)
    context.created  # noqa: B018 - says which run is not there
    for entry in _read_entries(context, follow=follow):
        line = Text(encode(entry).data.decode()) if as_json else _format_entry(entry)
        console.print(line, soft_wrap=True)


def _read_entries(context: RunContext, *, follow: bool) -> Iterator[Entry]:
    log = Log(context.store)
    yield from (record.entry for record in iterate_written(log, 0, log.state.n))
    while follow:
        yield from (record.entry for record in log.follow())
        time.sleep(LOOK_SECONDS)


def _format_entry(entry: Entry) -> Text:
    at = utc_time(entry.at)
    return Text.assemble((f"{at}  {entry.n:>6}  {entry.role:<10}  ", "dim"), describe_entry(entry))


def describe_entry(entry: Entry) -> str:
    """Describe a log entry in words."""
    body = entry.body
    match body:
        case RunCreated():
            source = body.source_version
            begins = f", begins with version {source.version} of run {source.run_id} ({source.uri})" if source else ""
            return f"run {body.run_id} created by rollflow {body.code_version or '(unknown)'}{begins}"
        case Claimed():
            return (
                f"claimed by {body.who or f'a {entry.role}'} (process {body.process} on {body.host or 'this machine'})"
            )
        case ConfigChanged():
            return change_sentence(RecordedConfig.of(entry))
        case EpochStarted():
            skipped = f"{len(body.skipped):,} solved questions are skipped"
            return f"epoch {body.number} of source {body.source} started: {body.asked:,} questions, {skipped}"
        case BatchCommitted():
            return _describe_batch(body)
        case BatchVoided():
            return f"batch {body.number} voided (entry {body.entry}): {body.why}"
        case VersionPublished():
            return _describe_version(body)
        case Pruned():
            return "pruned " + ", ".join(f"{kind} of version {version}" for version, kind in body.objects)


def _describe_batch(body: BatchCommitted) -> str:
    tokens = sum(group.tokens for group in body.groups)
    lost = Counter(discard.reason.value for discard in body.discards)
    reasons = ", ".join(f"{count} {reason}" for reason, count in lost.most_common())
    discarded = f"; discarded: {reasons}" if lost else ""
    keys = {group.key for group in body.groups} if body.unjudged else ()
    left_out = [one for one in body.unjudged if one.key in keys]
    if left_out:
        discarded += f"; {len(left_out)} unjudged responses left out"
    if body.unjudged:
        discarded += f"; why unjudged: {_join_lines(body.unjudged[-1].why)}"
    return f"batch {body.number} committed: {len(body.groups)} groups, {tokens:,} response tokens{discarded}"


def _join_lines(text: str) -> str:
    """Return a text as one line without control characters, so that the text cannot look like another log entry."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _describe_version(body: VersionPublished) -> str:
    source = "" if body.batch_entry is None else f", trained on batch {body.number - 1} (entry {body.batch_entry})"
    shown = "".join(f", {name} {body.metrics[name]:.4g}" for name in SHOWN if name in body.metrics)
    return f"version {body.number} published{source}{shown}"
