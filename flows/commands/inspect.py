"""Implements `rollflow inspect`, which shows a run, a policy version or a trajectory, and where it comes from. The
command reads only the run's storage.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from rollflow.flows.commands.cli.chosen_run import chosen_run
from rollflow.flows.commands.cli.exit_codes import OK
from rollflow.flows.locations import find_published
from rollflow.flows.services.times import utc_time
from rollflow.flows.views.audit_table import build_kind_table, domains_table
from rollflow.flows.views.config_history import change_sentence, list_changes
from rollflow.flows.views.console import staleness_bar
from rollflow.flows.views.frames.asked_frames import list_values, replay_named, show_turns
from rollflow.flows.views.inspect_values import (
    batch_of,
    check_key,
    describe_spans,
    describe_token_rewards,
    groups_of,
    next_prompts,
    run_value,
    trajectories_of,
    trajectory_value,
    version_value,
)
from rollflow.flows.views.progress import trained_domains
from rollflow.flows.views.progress_blocks import environment_rows, sandbox_rows
from rollflow.flows.views.turns import describe_logprobs, prompt_tokens, split_turns
from rollflow.storage.deltas.chain import name_of
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.log.entries import BatchCommitted, BatchVoided
from rollflow.storage.log.lineage import AwaitingTraining, Consumed, list_fates
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.log.state import RunState
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.records import GroupKey, Trajectory
from rollflow.storage.run_records.environment_figures import read_environment_uses
from rollflow.storage.run_records.episode_restarts import read_restarts
from rollflow.storage.run_records.recoveries import RecoveryLog
from rollflow.storage.run_records.sandbox_figures import read_sandbox_uses
from rollflow.tasks.environments.foreign.frames import FrameTaker
from rollflow.tasks.rollout.evaluation import read_newest
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.response_reader import ResponseReader

SHOWN_REASONS = 3  # Largest number of reasons for unjudged responses that are shown.
SHOWN = 12  # Largest number of response groups that a list names; further groups are only counted.


def command(options: argparse.Namespace) -> int:
    """Show the run, policy version or trajectory that the user names."""
    context = chosen_run(options)
    frames = replay_named(context, options.what) if options.frames else None
    if options.json:
        print(json.dumps(value_of(context, options.what) | (list_values(frames) if frames else {})))
    else:
        inspect(context, options.what, frames=frames)
    return OK


def value_of(context: RunContext, what: str | None) -> dict[str, Any]:
    """Return the run, policy version or trajectory that `what` names, as JSON values."""
    if what is None:
        return run_value(context)
    if (version := _parse_version(what)) is not None:
        return version_value(context, find_published(context, version))
    return trajectory_value(context, *_parse_trajectory(what))


def inspect(
    context: RunContext, what: str | None, console: Console | None = None, frames: FrameTaker | None = None
) -> None:
    """Print the run, a policy version (such as `7`) or a trajectory (`PROMPT.ATTEMPT[.SAMPLE]`). If `frames` is given,
    print also what the trajectory's environment rendered after each turn.

    Raises:
        ConfigError: the run has no such policy version or trajectory.
    """
    console = console or Console(highlight=False)
    context.created  # noqa: B018 - says which run is not there
    if what is None:
        _print_run(context, console)
    elif (version := _parse_version(what)) is not None:
        _print_version(context, version, console)
    else:
        _print_trajectory(context, *_parse_trajectory(what), console=console, frames=frames)


def _parse_version(what: str) -> int | None:
    return int(what) if re.fullmatch(r"\d+", what) else None


def _parse_trajectory(what: str) -> tuple[int, ...]:
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", what):
        raise ConfigError(
            f"{what!r} names neither a policy version (such as 7) nor a trajectory (PROMPT.ATTEMPT.SAMPLE, e.g. 12.0.3)"
        )
    return tuple(int(part) for part in what.split("."))


# --- the run ------------------------------------------------------------------------------------------------


def _print_run(context: RunContext, console: Console) -> None:
    state = context.log.state
    console.print(f"run {context.run_id} in {context.store.uri}", soft_wrap=True)
    table = _grid()
    of = f"of {context.config.versions}"
    table.add_row(
        "version", f"{state.version} {of}, entry {state.published}" if state.version >= 0 else f"none {of} yet"
    )
    table.add_row("log", f"{state.n + 1} entries")
    for recorded in list_changes(context):
        when = f"{utc_time(recorded.at)}, entry {recorded.entry}, by {recorded.who or 'unknown'}"
        table.add_row("changed", f"{change_sentence(recorded)} ({when})")
    table.add_row("batches", _describe_batches(state))
    groups, tokens = (counts["trained"] for counts in (state.totals.groups, state.totals.tokens))
    table.add_row("trained on", f"{state.totals.rows} trajectories in {groups} groups, {tokens} response tokens")
    table.add_row("staleness", staleness_bar(state.totals.staleness, 24))
    table.add_row("in flight", _format_keys(state.in_flight))
    table.add_row("next prompt", next_prompts(state.cursor))
    console.print(table)
    if len(shares := context.config.shares) > 1:
        held_out = read_newest(context.store)
        domains = held_out.domains if held_out else {}
        console.print(domains_table(trained_domains(state, context.config), shares, domains))
    lost = Counter({reason: count for reason, count in state.totals.groups.items() if reason != "trained"})
    console.print(_discard_table(lost, state.totals.tokens) if lost else "discards: none")
    if sandboxes := read_sandbox_uses(context.store).totals():
        # the stored counts do not say how many sandboxes are in use now
        rows = [{name: one for name, one in row.items() if name != "in use"} for row in sandbox_rows(sandboxes)]
        console.print(build_kind_table("sandboxes", rows))
    if environments := read_environment_uses(context.store).totals():
        console.print(build_kind_table("environments", environment_rows(environments)))
    _print_quarantined(context, console)
    _print_recoveries(context, console)
    _print_restarts(context, console)


def _describe_batches(state: RunState) -> str:
    again = f", to be formed again: {', '.join(map(str, state.holes))}" if state.holes else ""
    committed = state.next_batch - len(state.holes)
    return f"{committed} committed, {len(state.waiting)} of them waiting for the learner{again}"


def _discard_table(groups: Counter[str], tokens: Mapping[str, int]) -> Table:
    """Build a table that counts the discarded groups of responses in a run, by the reason for the discard."""
    table = Table(title="discards", title_justify="left")
    table.add_column("reason")
    for name in ("groups", "response tokens", "tokens a group"):
        table.add_column(name, justify="right")
    for reason, count in groups.most_common():
        table.add_row(reason, str(count), str(tokens[reason]), f"{tokens[reason] / count:.0f}")
    return table


def _print_quarantined(context: RunContext, console: Console) -> None:
    state = context.log.state
    console.print(f"quarantined batches: {state.voids or 'none'}")
    if not state.voids:
        return  # without a quarantined batch (a batch removed because of damage), the log need not be read
    for record in iterate_written(context.log, 0, state.n):
        if isinstance(body := record.entry.body, BatchVoided):
            file = context.batches.read_commit(body.entry).file.path
            why = body.why if file in body.why else f"{file}: {body.why}"
            console.print(f"  batch {body.number}: {why}", soft_wrap=True)


def _print_recoveries(context: RunContext, console: Console) -> None:
    journal = RecoveryLog(context.store)
    recoveries = journal.read()
    console.print(f"recoveries: {len(recoveries) or 'none'}")
    for path in journal.damaged:
        console.print(f"  {path} is damaged and does not count as a recovery", soft_wrap=True)
    for recovery in recoveries:
        console.print(f"  {utc_time(recovery.noticed_at)}  {recovery.sentence()}", soft_wrap=True)


def _print_restarts(context: RunContext, console: Console) -> None:
    """Print why episodes could not continue from their stored turns after a crash."""
    reasons = Counter(one.reason for one in read_restarts(context.store))
    for reason, count in reasons.most_common():
        console.print(f"  {count} episodes were generated anew: {reason}", soft_wrap=True, markup=False)


# --- a version ----------------------------------------------------------------------------------------------


def _print_version(context: RunContext, number: int, console: Console) -> None:
    version = find_published(context, number)
    console.print(f"version {number} of run {context.run_id}")
    table = _grid()
    table.add_row("published", f"{utc_time(version.at)}, entry {version.entry}, by claim {version.claim}")
    config = context.recorded_at(number)
    table.add_row(
        "code, config", f"rollflow {version.code_version}, config {config.sha256[:12]} (entry {config.entry})"
    )
    table.add_row("parent", _describe_parent(context, number))
    if version.batch_entry is not None:
        _add_batch_rows(context, version.batch_entry, table)
    if not version.state:
        table.add_row("learner state", "not stored with this version; recovery replays up to it")
    console.print(table)
    console.print(_object_table(context, version))
    console.print("metrics: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(version.metrics.items())))


def _describe_parent(context: RunContext, number: int) -> str:
    return f"version {number - 1} (entry {context.policies.find(number - 1).entry})" if number else "none"


def _add_batch_rows(context: RunContext, entry: int, table: Table) -> None:
    """Add table rows about the batch of a policy version: its groups of responses, its tokens by the policy version
    that generated them, its issued prompts and its discarded groups.
    """
    batch = context.batches.read_commit(entry)
    groups = f"{len(batch.groups)} groups: {_format_keys([group.key for group in batch.groups])}"
    table.add_row("batch", f"{batch.number} (entry {entry}), {groups}")
    table.add_row("tokens by", _count_tokens(context, batch))
    discards = context.batches.discards(entry)
    counts = Counter(d.reason.value for d in discards)
    lost = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    keys = _format_keys([d.key for d in discards])
    table.add_row("discarded", f"{lost}: {keys}" if lost else "none")
    for why, count in Counter(one.why for one in batch.unjudged).most_common(SHOWN_REASONS):
        table.add_row("not judged", Text(f"{count} responses: {why}"))
    table.add_row("issued", _format_keys([GroupKey(prompt, 0) for prompt in batch.issued]))


def _count_tokens(context: RunContext, batch: BatchCommitted) -> str:
    try:
        trajectories = [t for g in groups_of(context, batch.file) for t in g.trajectories]
    except Corrupt as error:
        return f"not readable: {error}"
    counts = Counter(v for t in trajectories for v, chosen in zip(t.versions, t.loss_mask, strict=True) if chosen)
    return ", ".join(f"version {version}: {count}" for version, count in sorted(counts.items()))


def _object_table(context: RunContext, version: PolicyVersion) -> Table:
    table = Table(title=f"objects in policies/{version.number:08d}/{version.claim}", title_justify="left")
    table.add_column("object", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("sha256")
    table.add_column("stored")
    for stored in version.objects:
        there = "yes" if context.store.exists(stored.path) else "no longer"
        table.add_row(name_of(stored), f"{stored.size:,}", stored.sha256[:12], there)
    return table


# --- a trajectory -------------------------------------------------------------------------------------------


def _print_trajectory(
    context: RunContext,
    prompt: int,
    attempt: int,
    sample: int | None = None,
    *,
    console: Console,
    frames: FrameTaker | None,
) -> None:
    key, attempts = GroupKey(prompt, attempt), list_fates(context.log, prompt)
    check_key(key, attempts, context.log.state.cursor)
    table, below = _grid(), None
    for other, fate in sorted(attempts.items()):
        table.add_row(f"attempt {other.attempt}", Text(str(fate), style="bold" if other == key else ""))
    fate = attempts[key]
    if isinstance(fate, Consumed | AwaitingTraining):
        below = _show_trajectories(context, key, batch_of(context, fate), sample, table, frames)
    else:
        table.add_row("question", Text(_read_question(context, prompt)))
        table.add_row("responses", "not in storage: it was never committed")
    name = f"prompt {prompt}, attempt {attempt}" + ("" if sample is None else f", sample {sample}")
    console.print(f"{name} of run {context.run_id}")
    console.print(table)
    if below is not None:
        console.print(below)


def _read_question(context: RunContext, prompt: int) -> str:
    """Return the text of a prompt. If the run does not store its prompts, return the reason why the prompt's text is
    not available.
    """
    try:
        return context.prompts().prompt(prompt).text
    except (ConfigError, Corrupt) as error:
        return f"not available: {error}"


def _show_trajectories(
    context: RunContext,
    key: GroupKey,
    batch: BatchCommitted,
    sample: int | None,
    table: Table,
    frames: FrameTaker | None,
) -> Table | Group | None:
    """Add rows about one trajectory to the table `table`. If `sample` is None, return a table of all trajectories in
    the group of responses to one prompt.
    """
    chosen = trajectories_of(context, key, batch, sample)
    one = chosen[0]
    table.add_row("question", Text(context.tokenizer.decode(prompt_tokens(one))))
    if sample is None:
        return _group_table(context, key, chosen, batch.number)
    parts = split_turns(one)
    several = sum(part.author == "policy" for part in parts) > 1 or parts[-1].author == "environment"
    if not (several or frames):
        table.add_row("response", Text(ResponseReader(context).read(key.prompt, one)))
    table.add_row("tokens", f"{one.response_tokens}: {describe_spans(one)}")
    table.add_row("log-probs", describe_logprobs([value for part in parts for value in part.logprobs]))
    reward = "none, left out of its group" if one.left_out else f"{one.reward:g}"
    table.add_row("reward", Text(f"{reward} ({one.reason})" if one.reason else reward))
    for row in _describe_optional(one):
        table.add_row(*row)
    table.add_row("ending", one.ending.value)
    table.add_row("staleness", f"{batch.number - one.started_version} (started under version {one.started_version})")
    folder = Path(f"{context.run_id}-{key.prompt}.{key.attempt}.{sample}-frames")
    return show_turns(context, parts, frames, folder) if several or frames else None


def _describe_optional(one: Trajectory) -> Iterator[tuple[str, str]]:
    """Yield table rows for values of a trajectory that only some runs record, such as the parts of its reward."""
    if one.reward_parts:
        yield "reward parts", _describe_parts(one)
    if one.token_rewards is not None:
        yield "token rewards", describe_token_rewards(one)
    if one.outcome is not None:
        yield "outcome", one.outcome.value
    if one.scorer_version is not None:
        yield "scorer version", one.scorer_version
    if one.role is not None:
        yield "role", one.role
    if one.branch is not None:
        yield "branch", f"of sample {one.branch.parent}, from token {one.branch.position} on"
    for position, part in one.foreign_parts or ():
        yield part.kind, f"at position {position}, {part.length} positions, sha256 {part.sha256[:12]}"


def _describe_parts(one: Trajectory) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in (one.reward_parts or {}).items())


def _group_table(context: RunContext, key: GroupKey, trajectories: Sequence[Trajectory], number: int) -> Table:
    table = Table(title="trajectories", title_justify="left")
    optional: dict[str, Callable[[Trajectory], str]] = {
        "reward parts": _describe_parts,
        "outcome": lambda t: "" if t.outcome is None else t.outcome.value,
        "role": lambda t: t.role or "",
        "branch": lambda t: "" if t.branch is None else f"of {t.branch.parent}",
    }
    shown = {name: cell for name, cell in optional.items() if any(map(cell, trajectories))}
    for name in ("sample", "reward", *shown, "ending", "staleness", "tokens", "response"):
        table.add_column(name, justify="right" if name in ("sample", "reward", "staleness", "tokens") else "left")
    reader = ResponseReader(context)
    for t in trajectories:
        stale, response = str(number - t.started_version), Text(reader.read(key.prompt, t), overflow="ellipsis")
        cells = [cell(t) for cell in shown.values()]
        reward = "left out" if t.left_out else f"{t.reward:g}"
        table.add_row(str(t.sample), reward, *cells, t.ending.value, stale, str(t.response_tokens), response)
    return table


# --- words --------------------------------------------------------------------------------------------------


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _format_keys(keys: Sequence[GroupKey]) -> str:
    """Format at most `SHOWN` names of response groups, each as PROMPT.ATTEMPT, and say how many more there are."""
    named = ", ".join(f"{key.prompt}.{key.attempt}" for key in sorted(keys)[:SHOWN])
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{named}{more}" if keys else "none"
