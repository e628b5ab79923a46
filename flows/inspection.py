"""`rollflow inspect`: what a run, a version or a trajectory is and came from, read from the run's storage alone."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollflow.flows.audit_table import domains_table
from rollflow.flows.console import staleness_bar
from rollflow.flows.progress import Progress
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError, Corrupt
from rollflow.storage.lineage import Consumed, Discarded, Fate, InFlight, Lineage, Waiting
from rollflow.storage.policies import Manifest
from rollflow.storage.records import Cursor, Discard, GroupKey, Trajectory
from rollflow.storage.recoveries import RecoveryLog
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.learners.restore import name_of
from rollflow.tasks.run import RunContext

SHOWN = 12  # keys in a list; the rest is counted


def inspect(context: RunContext, what: str | None, console: Console | None = None) -> None:
    """Print the run, the version `7`, or the trajectory `PROMPT.ATTEMPT[.SAMPLE]`.

    Raises:
        ConfigError: there is no such version or trajectory.
    """
    console = console or Console(highlight=False)
    if what is None:
        _run(context, console)
    elif re.fullmatch(r"\d+", what):
        _version(context, int(what), console)
    elif re.fullmatch(r"\d+\.\d+(\.\d+)?", what):
        _trajectory(context, *(int(part) for part in what.split(".")), console=console)
    else:
        raise ConfigError(
            f"{what!r} names neither a version (such as 7) nor a trajectory (PROMPT.ATTEMPT.SAMPLE, such as 12.0.3)"
        )


# --- the run ------------------------------------------------------------------------------------------------


def _run(context: RunContext, console: Console) -> None:
    batches = TrajectoryStore(context.store)
    progress = Progress(context)
    progress.advance()
    lineage = Lineage.read(batches, progress.version)
    console.print(f"run {context.run_id} in {context.store.uri}", soft_wrap=True)
    table = _grid()
    of = f" of {context.config.versions}"
    table.add_row("version", f"{progress.version}{of}" if progress.version >= 0 else f"none{of} yet")
    table.add_row("batches", _batches(lineage))
    rows = sum(c.rows for c in lineage.commits if c.number < progress.version)
    table.add_row("trained on", f"{rows} trajectories, {progress.tokens} response tokens")
    table.add_row("staleness", staleness_bar(progress.staleness, 24))
    flying = [key for key, fate in lineage.fates.items() if isinstance(fate, InFlight)]
    table.add_row("in flight", _keys(flying))
    table.add_row("next prompt", _upcoming(lineage.cursor))
    console.print(table)
    if len(shares := context.config.shares) > 1:
        console.print(domains_table(progress.domains, shares))
    lost = [fate.discard for fate in lineage.fates.values() if isinstance(fate, Discarded)]
    console.print(_discards(lost) if lost else "discards: none")
    _quarantined(batches, console)
    _recoveries(context, console)


def _batches(lineage: Lineage) -> str:
    waiting = {fate.batch for fate in lineage.fates.values() if isinstance(fate, Waiting)}
    return f"{len(lineage.commits)} committed, {len(waiting)} of them waiting for the learner"


def _discards(lost: Iterable[Discard]) -> Table:
    table = Table(title="discards", title_justify="left")
    table.add_column("reason")
    for name in ("groups", "response tokens", "tokens a group"):
        table.add_column(name, justify="right")
    groups, tokens = Counter[str](), Counter[str]()
    for discard in lost:
        groups[discard.reason] += 1
        tokens[discard.reason] += discard.response_tokens
    for reason, count in groups.most_common():
        table.add_row(reason, str(count), str(tokens[reason]), f"{tokens[reason] / count:.0f}")
    return table


def _quarantined(batches: TrajectoryStore, console: Console) -> None:
    voids = batches.voids()
    console.print(f"quarantined files: {len(voids) or 'none'}")
    for void in voids:
        why = void.reason if void.file in void.reason else f"{void.file}: {void.reason}"
        console.print(f"  batch {void.batch}: {why}", soft_wrap=True)


def _recoveries(context: RunContext, console: Console) -> None:
    recoveries = RecoveryLog(context.store).read()
    console.print(f"recoveries: {len(recoveries) or 'none'}")
    for recovery in recoveries:
        console.print(f"  {_clock(recovery.noticed_at)}  {recovery.sentence()}", soft_wrap=True)


# --- a version ----------------------------------------------------------------------------------------------


def published(context: RunContext, version: int) -> Manifest:
    """The manifest of a version that a person names; `ConfigError` if there is none."""
    policies = context.policies()
    latest = policies.latest()
    if not 0 <= version <= latest:
        there = f"has versions 0 to {latest}" if latest >= 0 else "has none yet"
        raise ConfigError(f"version {version} is not published; run {context.run_id!r} {there}")
    return policies.manifest(version)


def _version(context: RunContext, version: int, console: Console) -> None:
    manifest, batches = published(context, version), TrajectoryStore(context.store)
    parent = f"version {version - 1} (manifest {manifest.parent[:12]})" if manifest.parent else "none"
    console.print(f"version {version} of run {context.run_id}")
    table = _grid()
    table.add_row("published", f"{_clock(manifest.created_at)} by writer {manifest.writer}")
    table.add_row("code, config", f"rollflow {manifest.code_version}, config {manifest.config_sha256[:12]}")
    table.add_row("parent", parent)
    if version:
        _trained_on(batches, manifest, table)
    if not manifest.learner:
        table.add_row("learner state", "not stored with this version; recovery replays up to it")
    console.print(table)
    console.print(_objects(context, manifest))
    console.print("metrics: " + ", ".join(f"{name} {value:.4g}" for name, value in sorted(manifest.metrics.items())))


def _trained_on(batches: TrajectoryStore, manifest: Manifest, table: Table) -> None:
    """The batch, its groups, what was discarded when it was formed, and which versions wrote its tokens."""
    number = manifest.version - 1
    groups = f"{len(manifest.consumed)} groups: {_keys(manifest.consumed)}"
    table.add_row("batch", f"{number} (commit {manifest.batch[:12] if manifest.batch else 'unknown'}), {groups}")
    table.add_row("tokens by", _tokens_by(batches, number))
    counts = Counter(d.reason.value for d in manifest.discarded)
    lost = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    keys = _keys([d.key for d in manifest.discarded])
    table.add_row("discarded", f"{lost}: {keys}" if lost else "none")
    table.add_row("next prompt", _upcoming(manifest.cursor))


def _tokens_by(batches: TrajectoryStore, number: int) -> str:
    try:
        trajectories = [t for g in TrajectoryBatch.from_bytes(batches.read(number)[1]).groups() for t in g.trajectories]
    except Corrupt as error:
        return f"not to be read: {error}"
    counts = Counter(v for t in trajectories for v, chosen in zip(t.versions, t.loss_mask, strict=True) if chosen)
    return ", ".join(f"version {version}: {count}" for version, count in sorted(counts.items()))


def _objects(context: RunContext, manifest: Manifest) -> Table:
    table = Table(title=f"objects in policies/{manifest.version:08d}/{manifest.writer}", title_justify="left")
    table.add_column("object", overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_column("sha256")
    table.add_column("stored")
    for stored in (*manifest.weights, *manifest.learner):
        there = "yes" if context.store.exists(stored.path) else "no longer"
        table.add_row(name_of(stored), f"{stored.size:,}", stored.sha256[:12], there)
    return table


# --- a trajectory -------------------------------------------------------------------------------------------


def _trajectory(context: RunContext, prompt: int, attempt: int, sample: int | None = None, *, console: Console) -> None:
    batches, key = TrajectoryStore(context.store), GroupKey(prompt, attempt)
    lineage = Lineage.read(batches, context.policies().latest())
    attempts = lineage.attempts(prompt)
    _check_key(key, attempts, lineage.cursor)
    table, below = _grid(), None
    for other, fate in attempts.items():
        table.add_row(f"attempt {other.attempt}", Text(str(fate), style="bold" if other == key else ""))
    fate = attempts[key]
    if isinstance(fate, Consumed | Waiting):
        number = fate.version - 1 if isinstance(fate, Consumed) else fate.batch
        below = _answers(context, batches, key, number, sample, table)
    else:
        table.add_row("question", Text(_question(context, prompt)))
        table.add_row("responses", "not in storage: it was never committed")
    name = f"prompt {prompt}, attempt {attempt}" + ("" if sample is None else f", sample {sample}")
    console.print(f"{name} of run {context.run_id}")
    console.print(table)
    if below is not None:
        console.print(below)


def _question(context: RunContext, prompt: int) -> str:
    """Its text, which storage alone does not tell where the run's prompts are not kept there."""
    try:
        return context.order().prompt(prompt).text
    except (ConfigError, Corrupt) as error:
        return f"not to be had: {error}"


def _check_key(key: GroupKey, attempts: dict[GroupKey, Fate], cursor: Cursor) -> None:
    if key in attempts:
        return
    if attempts:
        issued = ", ".join(str(k.attempt) for k in attempts)
        raise ConfigError(f"prompt {key.prompt} has no attempt {key.attempt}; it was issued as attempt {issued}")
    raise ConfigError(
        f"prompt {key.prompt} was not dispatched when the newest batch was committed; "
        f"the next prompt is {_upcoming(cursor)}"
    )


def _answers(
    context: RunContext, batches: TrajectoryStore, key: GroupKey, number: int, sample: int | None, table: Table
) -> Table | None:
    """One trajectory in full, added to `table`; or the group's question, and its trajectories as a table."""
    groups = TrajectoryBatch.from_bytes(batches.read(number)[1]).groups()
    group = next(g for g in groups if g.key == key)
    chosen = [t for t in group.trajectories if sample in (None, t.sample)]
    if not chosen:
        last = max(t.sample for t in group.trajectories)
        raise ConfigError(f"{key.prompt}.{key.attempt} has samples 0 to {last}; there is no sample {sample}")
    one = chosen[0]
    asked = [token for token, mask in zip(one.tokens, one.loss_mask, strict=True) if not mask]
    table.add_row("question", Text(context.tokenizer.decode(asked)))
    if sample is None:
        return _group(context, chosen, number)
    table.add_row("response", Text(_response(context, one)))
    table.add_row("tokens", f"{one.response_tokens}: {_spans(one)}")
    table.add_row("reward", f"{one.reward:g} ({one.reason})" if one.reason else f"{one.reward:g}")
    table.add_row("ending", one.ending.value)
    table.add_row("staleness", f"{number - one.started_version} (started under version {one.started_version})")
    return None


def _group(context: RunContext, trajectories: Sequence[Trajectory], number: int) -> Table:
    table = Table(title="trajectories", title_justify="left")
    for name in ("sample", "reward", "ending", "staleness", "tokens", "response"):
        table.add_column(name, justify="left" if name in ("ending", "response") else "right")
    for t in trajectories:
        stale, response = str(number - t.started_version), Text(_response(context, t), overflow="ellipsis")
        table.add_row(str(t.sample), f"{t.reward:g}", t.ending.value, stale, str(t.response_tokens), response)
    return table


def _response(context: RunContext, trajectory: Trajectory) -> str:
    chosen = [token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]
    return context.tokenizer.decode(chosen)


def _spans(trajectory: Trajectory) -> str:
    """Which version wrote which of the response's tokens."""
    written = [v for v, mask in zip(trajectory.versions, trajectory.loss_mask, strict=True) if mask]
    spans, start = [], 0
    for version, run in groupby(written):
        end = start + len(list(run))
        spans.append(f"{start}-{end - 1} by version {version}" if end - start > 1 else f"{start} by version {version}")
        start = end
    return ", ".join(spans)


# --- words --------------------------------------------------------------------------------------------------


def _grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _keys(keys: Sequence[GroupKey]) -> str:
    """Dispatches as a person names them: PROMPT.ATTEMPT."""
    named = ", ".join(f"{key.prompt}.{key.attempt}" for key in sorted(keys)[:SHOWN])
    more = f" and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
    return f"{named}{more}" if keys else "none"


def _upcoming(cursor: Cursor) -> str:
    """The next prompt of each source."""
    return " or ".join(map(str, cursor.upcoming)) or "0"


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
