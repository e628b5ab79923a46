"""Tests the output of `replay`, `inspect`, `audit` and `gc` for a small trained run, and their errors."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollflow.flows.commands.cli import main
from rollflow.flows.views.audit_table import show_audit, staleness_table
from rollflow.flows.views.progress import RunProgress
from rollflow.flows.views.summary import summarize
from rollflow.storage import policies
from rollflow.storage.audit.anchors import first_anchor, newest_anchor
from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import Unreachable
from rollflow.storage.log.entries import WrittenEntry
from rollflow.storage.log.reading import iterate_written
from rollflow.storage.log.run_log import Log
from rollflow.storage.run_records.recoveries import Recovery, RecoveryLog
from rollflow.tasks.actors.statuses import RolloutStatus
from rollflow.tasks.run.context import RunContext
from tests.support.log_runs import changed, sha256_of
from tests.support.small_run import prepare_small, train_small
from tests.support.waiting import HANG_SECONDS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Train 5 of 6 versions, the last two by a second learner, with a stored state every third version; see
    `small_run.batch`.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setenv("COLUMNS", "110")
        context = prepare_small(home, state_every=3)
        train_small(context, 3)
        train_small(context, 5)
        died = Recovery("learner", "its process was killed", 1e9, 1e9 + 2, 1e9 + 4.5, "the step of version 4")
        RecoveryLog(context.store).append(died)
        yield context


@pytest.fixture
def copy(trained: RunContext, tmp_path: Path) -> RunContext:
    """Copy the run to a new folder, so that a test may change it."""
    shutil.copytree(trained.store.uri, tmp_path / "copy")
    return RunContext(str(tmp_path / "copy"), tmp_path / "cache")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Return a command's output with whitespace collapsed."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return re.sub(r"[ \n]+", " ", captured.out if code < 2 else captured.err)


def published_again(run: RunContext, version: int) -> None:
    """Give the version after `version` the same weights as `version`, and change the hash in its log entry to match."""
    published, other = run.policies.find(version + 1), run.policies.find(version)
    data = run.store.get(other.weights[0].path)
    run.store.put(published.weights[0].path, data)
    said = replace(published.weights[0], sha256=hashlib.sha256(data).hexdigest(), size=len(data))
    changed(run.store, published.entry, lambda body: replace(body, weights=(said,)))


def test_replay_reports_each_retrained_version(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    sha256 = trained.policies.find(5).weights[0].sha256[:12]
    sentence = f"version 5: parent 4, batch 4 (2 groups, 8 trajectories): weights identical (sha256 {sha256})"
    assert sentence in shown(capsys, "replay", "small")
    every = shown(capsys, "replay", "small", "--all")
    assert every.count("identical") == 5
    assert sentence in every
    assert "version 3: parent 2, batch 2 (2 groups, 8 trajectories): weights and learner state identical" in every


def test_replay_fails_on_different_weights(copy: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    published = copy.policies.find(4)
    other = replace(published.weights[0], sha256="0" * 64)
    changed(copy.store, published.entry, lambda body: replace(body, weights=(other,)))
    out = shown(capsys, "replay", copy.uri, "--all", code=1)
    assert "batch 3 (2 groups, 8 trajectories): DIFFERENT in weights/model.safetensors" in out
    assert "only on the same kind of machine" in out
    assert out.endswith("versions 5 to 5 follow from it and were not trained again ")


def test_replay_with_other_rank_count_differs_only_by_rounding(
    trained: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each version is retrained from its published parent, and agrees up to rounding. With another number of ranks,
    equal bits would be a coincidence.
    """
    out = shown(capsys, "replay", "small", "--all", "--ranks", "2")
    assert out.count("parent") == 5
    assert out.count("which is rounding: ranks 2 instead of 1") + out.count("identical") == 5
    assert "by up to" in out
    assert "--ranks = 0: choose 1 or more" in shown(capsys, "replay", "small", "--ranks", "0", code=2)


def test_replay_with_other_rank_count_fails_beyond_rounding(
    copy: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    published_again(copy, 3)
    out = shown(capsys, "replay", copy.uri, "4", "--ranks", "2", code=1)
    assert "DIFFERENT in" in out
    assert "weights/model.safetensors by up to" in out


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ({}, 1e-3),
        ({"dtype": "bfloat16"}, 1e-6),
        pytest.param({}, 1e-6, marks=pytest.mark.soak),
        pytest.param({"dtype": "bfloat16"}, 1e-3, marks=pytest.mark.soak),
    ],
)
def test_replay_tolerance_is_relative_to_the_weight_change(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    given: dict[str, Any],
    rate: float,
) -> None:
    """At a small learning rate, the weights of all versions are close to each other. In bfloat16, rounding changes a
    weight by a whole unit in the last place.
    """
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    run = prepare_small(tmp_path, versions=2, train={"learning_rate": rate}, keep_last=3, **given)
    train_small(run)
    assert shown(capsys, "replay", "small", "--all", "--ranks", "2").count("which is rounding") == 2
    published_again(run, 1)
    assert "DIFFERENT in" in shown(capsys, "replay", "small", "--ranks", "2", code=1)


def test_replay_with_other_rank_count_skips_pruned_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights of version 4 are stored, but not those of its parent. The two later versions are trained from
    versions whose weights are stored.
    """
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    train_small(prepare_small(tmp_path, versions=6, keep_last=2, state_every=2, keep_every=4))
    assert shown(capsys, "replay", "small", "--all").count("identical") == 6
    out = shown(capsys, "replay", "small", "--all", "--ranks", "2")
    assert re.findall(r"version (\d): parent", out) == ["5", "6"]
    assert "4 versions are skipped: their weights, or those of a version before them, were pruned" in out
    assert "versions 2 to 2: their weights" in shown(capsys, "replay", "small", "2", "--ranks", "2", code=2)


def test_inspect_command_shows_a_run(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "inspect", "small")
    for words in (
        "version 5 of 6",
        "6 committed, 1 of them waiting for the learner",
        "trained on 40 trajectories in 10 groups, ",
        "0 20% 1 80%",
        "in flight 12.0",
        "next prompt 13",
        "stale │ 1 │ 21 │ 21",
        "quarantined batches: none",
        "recoveries: 1 ",
        "learner: its process was killed; back after 4.5 s; work done again: the step of version 4",
    ):
        assert words in out, out


def test_trained_domain_shares_are_shown_beside_configured_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources are issued in turn, although one should have three times the groups of the other."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "110")
    prompts = [
        {"kind": "reasoning-gym", "family": family, "share": share} for family, share in (("gcd", 3), ("lcm", 1))
    ]
    context = prepare_small(tmp_path, "two", prompts=prompts)
    train_small(context, 5)
    for command in ("audit", "inspect"):
        out = shown(capsys, command, "two")
        assert "trained groups by domain" in out
        assert "│ gcd │ 5 │ 50.0% │ 75.0% │ │ lcm │ 5 │ 50.0% │ 25.0% │" in out
    assert "next prompt 14 or 13" in out
    assert "the next prompt is 14 or 13" in shown(capsys, "inspect", "two", "14.0", code=2)
    metrics = context.policies.find(3).metrics
    assert (metrics["groups_gcd"], metrics["groups_lcm"]) == (1.0, 1.0)
    summary = summarize(context, audit(context.store), {}, RolloutStatus(prefix_hits=0.25), {})
    assert summary["prefix_cache_hits"] == 0.25
    assert summary["domains"]["gcd"] == {"groups": 5, "share": 0.5, "asked": 0.75}


def test_inspect_shows_a_version(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    version, parent = trained.policies.find(3), trained.policies.find(2)
    [weights] = version.weights
    out = shown(capsys, "inspect", "small", "3")
    for words in (
        f"entry {version.entry}, by claim {version.claim} ",
        f"config {trained.created.config_sha256[:12]} ",
        f"parent version 2 (entry {parent.entry}) ",
        f"batch 2 (entry {version.batch_entry}), 2 groups: 4.1, 5.0",
        "discarded 1 stale: 4.0",
        "issued 5.0, 6.0 ",
        f"objects in policies/00000003/{version.claim} ",
        f"weights/model.safetensors │ {weights.size:,} │ {weights.sha256[:12]} │ yes",
        "learner/state.safetensors",
        "reward 0.5",
    ):
        assert words in out, out
    assert re.search(r"tokens by version 1: \d+, version 2: \d+", out)
    assert "learner state not stored with this version" in shown(capsys, "inspect", "small", "4")


def test_inspect_shows_discarded_responses_of_a_voided_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The discards of the damaged batch are shown with the batch that replaced it."""
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "110")
    context = prepare_small(tmp_path, "again")
    train_small(context, 2)
    context.store.delete(context.log.state.waiting[2].file.path)
    train_small(context, 3)
    out = shown(capsys, "inspect", "again", "3")
    for words in ("2 groups: 4.2, 5.1", "discarded 1 stale: 4.0"):
        assert words in out, out


def test_inspect_shows_a_trajectory(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    question = trained.prompts().prompt(4).text
    out = shown(capsys, "inspect", "small", "4.1.2")
    for words in (
        "attempt 0 discarded as stale when batch 2 was formed; started under version 0; 21 response tokens",
        "attempt 1 trained into version 3",
        f"question {question}",
        "tokens 4: 0-1 by version 1, 2-3 by version 2",
        "reward 0 (wrong: 7 is not the answer)",
        "ending stop",
        "staleness 1 (started under version 1)",
    ):
        assert words in out, out
    group = shown(capsys, "inspect", "small", "4.1")
    assert "│ 3 │ 1 │ stop │ 1 │ 3 │" in group
    gone = shown(capsys, "inspect", "small", "4.0")
    assert f"question {question} responses not in storage" in gone
    assert "committed in batch 5, which waits for the learner" in shown(capsys, "inspect", "small", "11.0.1")
    assert "in flight when batch 5, the newest batch, was formed" in shown(capsys, "inspect", "small", "12.0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("inspect", "small", "9"), "version 9 is not published; run 'small' has versions 0 to 5"),
        (("inspect", "small", "13.0"), "prompt 13 was not yet issued when the newest batch was committed"),
        (("inspect", "small", "4.7"), "prompt 4 has no attempt 7, because it was issued only as attempt 0, 1"),
        (("inspect", "small", "3.0.9"), "3.0 has no sample 9; give one from 0 to 3"),
        (("inspect", "small", "v7"), "'v7' names neither a policy version (such as 7) nor a trajectory"),
        (("inspect", "nobody"), "there is no such run"),
        (("replay", "small", "0"), "version 0 was not trained from a batch"),
        (("replay", "small", "6"), "VERSION = 6: run 'small' has only the versions 0 to 5"),
        (("replay", "nobody"), "there is no such run"),
        (("gc", "small", "--older-than", "soon"), "'soon' is not an age; write 90s, 30m, 1h or 2d"),
        (("gc", "nobody"), "there is no such run"),
    ],
)
def test_missing_version_gets_a_one_sentence_error(
    trained: RunContext, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in shown(capsys, *arguments, code=2)


def test_gc_command_lists_garbage_and_then_deletes_it(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    superseded = trained.policies.find(1).claim
    stray = f"policies/00000005/{superseded}/weights/model.safetensors"
    trained.store.put(stray, b"x" * 1234)
    assert "nothing to collect that is older than 1h" in shown(capsys, "gc", "small", "--dry-run")
    out = shown(capsys, "gc", "small", "--dry-run", "--older-than", "0s")
    assert "1 objects, 1,234 bytes would be deleted (--dry-run)" in out
    assert trained.store.exists(stray)
    out = shown(capsys, "gc", "small", "--older-than", "0s")
    assert "1 objects, 1,234 bytes deleted" in out
    assert not trained.store.exists(stray)
    assert "identical" in shown(capsys, "replay", "small", "--all")


def test_inspect_shows_quarantined_batches(copy: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy.log.state.waiting[5].file.path
    copy.store.put(file, b"not what it was")
    copy.batches.void(copy.log.claim("scheduler"), 5, "it was cut")
    out = shown(capsys, "inspect", copy.uri)
    assert f"quarantined batches: 1 batch 5: {file}: it was cut" in out, out
    assert "5 committed, 0 of them waiting for the learner, to be formed again: 5 " in out
    assert "in flight 10.1, 11.1, 12.0 " in out
    again = shown(capsys, "inspect", copy.uri, "10.0")
    assert "attempt 0 in batch 5, which was quarantined; the prompt was issued again" in again
    assert "attempt 1 in flight when batch 5, the newest batch, was formed" in again
    assert ": it was cut" in shown(capsys, "audit", copy.uri)


def test_audit_starts_where_the_last_audit_ended(copy: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    entries = copy.log.state.n + 1
    first = shown(capsys, "audit", copy.uri)
    assert f"{entries} entries, " in first
    assert re.search(rf"read {entries} entries and [\d,]+ bytes of objects trajectories", first), first
    second = shown(capsys, "audit", copy.uri)
    assert (
        f"read 0 entries and 0 bytes of objects, from entry {entries} on, because an earlier audit found nothing wrong"
        in second
    )
    file = copy.batches.read_commit(copy.policies.find(1).batch_entry or 0).file.path
    copy.store.put(file, b"not what it was")
    deep = shown(capsys, "audit", copy.uri, "--deep", code=1)
    assert f"read {entries} entries" in deep
    assert f"altered {file}" in deep


def test_terminal_shows_audit_progress(copy: RunContext) -> None:
    for terminal in (True, False):
        console = Console(file=StringIO(), force_terminal=terminal, width=110)
        assert show_audit(copy.store, deep=True, console=console).clean
        assert isinstance(console.file, StringIO)
        assert ("audit: " in console.file.getvalue()) == terminal


def test_staleness_table_has_one_row_per_version_range() -> None:
    """Each row of the table covers the number of versions that the report combines; the last row may cover fewer."""
    report = AuditReport(versions=7, span=3, staleness=Counter({0: 7}))
    report.staleness_by_version = {1: Counter({0: 3}), 4: Counter({0: 3}), 7: Counter({0: 1})}
    assert list(staleness_table(report).columns[0].cells) == ["1-3", "4-6", "7", "all"]


def test_progress_shows_each_version_once_despite_failed_reads(
    trained: RunContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each version is yielded once, even if a read of the log fails in the middle."""
    progress = RunProgress(RunContext(trained.uri, trained.cache))

    def broken(log: Log, first: int, last: int) -> Iterator[WrittenEntry]:
        yield from iterate_written(log, first, last // 2)
        raise Unreachable("object storage did not answer")

    with monkeypatch.context() as away:
        away.setattr(policies, "iterate_written", broken)
        with pytest.raises(Unreachable):
            progress.advance()
    assert [version.number for version in progress.advance()] == [0, 1, 2, 3, 4, 5]
    assert progress.advance() == []
    assert progress.version == 5
    assert progress.staleness == {0: 2, 1: 8}
    assert progress.domains.total() == 10


@pytest.mark.long
def test_reading_a_run_imports_no_large_library(trained: RunContext) -> None:
    code = f"""
import sys
from rollflow.flows.commands.cli import main
assert [main(["inspect", "{trained.uri}", *what]) for what in ([], ["3"], ["4.1.2"])] == [0, 0, 0]
assert main(["gc", "{trained.uri}", "--dry-run"]) == 0
assert main(["audit", "{trained.uri}"]) == 0
heavy = {{"torch", "ray", "vllm", "prefect", "mlflow", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)


def test_audit_compares_log_entries_with_external_hashes(copy: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    """The anchors (hashes of log entries) match until somebody rewrites the log with another staleness bound."""
    kept = [str(first_anchor(copy.store)), str(newest_anchor(copy.log.state))]
    given = [word for anchor in kept for word in ("--anchor", anchor)]
    assert "clean" in shown(capsys, "audit", copy.uri, "--deep", *given)
    config = {**copy.created.config, "async_ratio": 1.25}
    changed(copy.store, 0, lambda body: replace(body, config=config, config_sha256=sha256_of(config)))
    assert "clean" in shown(capsys, "audit", copy.uri, "--deep")
    said = shown(capsys, "audit", copy.uri, "--deep", *given, code=1)
    assert said.count("the log was rewritten or repaired after the anchor was taken") == 2
    refused = shown(capsys, "audit", copy.uri, "--anchor", "7", code=2)
    assert "anchor '7' is not of the form N:SHA256; give the number" in refused


def test_audit_reports_skipped_checks(copy: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    """The package that made the prompts has changed. This change is not a violation, but the next audit does not
    continue from such an audit.
    """
    pins = [{**pin, "version": "0.0.1"} for pin in copy.created.prompts]
    changed(copy.store, 0, lambda body: replace(body, prompts=tuple(pins)))
    for _ in range(2):
        said = shown(capsys, "audit", copy.uri)
        assert "prompts are not checked, because" in said
        assert "reasoning-gym 0.0.1" in said
    changed(copy.store, 0, lambda body: replace(body, prompts=copy.created.prompts))
    said = shown(capsys, "audit", copy.uri)
    assert "not checked" not in said
    assert "an earlier audit found nothing wrong before it" not in said
