"""replay, inspect and gc on a small real run: what a person reads, and the sentence for what does not exist."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rollflow.flows.cli import main
from rollflow.flows.summary import SHARES, summarize
from rollflow.storage.objects import open_store
from rollflow.storage.policies import manifest_path
from rollflow.storage.recoveries import Recovery, RecoveryLog
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.run import RunContext
from tests.support.small_run import prepare_small, train_small
from tests.support.waiting import HANG_SECONDS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """5 of 6 versions trained, state with every third; see `small_run.batch` for what is in the batches."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setenv("COLUMNS", "110")
        context = prepare_small(home, state_every=3)
        train_small(context, 5)
        died = Recovery("learner", "its process was killed", 1e9, 1e9 + 2, 1e9 + 4.5, "the step of version 4")
        RecoveryLog(context.store).append(died)
        yield context


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What a command prints, with runs of blanks as one."""
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.out + captured.err
    return re.sub(r"[ \n]+", " ", captured.out if code < 2 else captured.err)


def test_replay_says_what_was_trained_again(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    sha256 = trained.policies().manifest(5).weights[0].sha256[:12]
    sentence = f"version 5: parent 4, batch 4 (2 groups, 8 trajectories): weights identical (sha256 {sha256})"
    assert sentence in shown(capsys, "replay", "small")
    every = shown(capsys, "replay", "small", "--all")
    assert every.count("identical") == 5
    assert sentence in every
    assert "version 3: parent 2, batch 2 (2 groups, 8 trajectories): weights and learner state identical" in every


def test_replay_fails_where_something_else_was_published(
    trained: RunContext, capsys: pytest.CaptureFixture[str]
) -> None:
    policies, path = trained.policies(), manifest_path(4)
    before, manifest = trained.store.get(path), policies.manifest(4)
    other = replace(manifest.weights[0], sha256="0" * 64)
    trained.store.put(path, replace(manifest, weights=(other,)).to_json())
    try:
        out = shown(capsys, "replay", "small", "--all", code=1)
    finally:
        trained.store.put(path, before)
    assert "batch 3 (2 groups, 8 trajectories): DIFFERENT in weights/model.safetensors" in out
    assert "only on the same kind of machine" in out
    assert out.endswith("versions 5 to 5 follow from it and were not trained again ")


def test_inspect_a_run(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    out = shown(capsys, "inspect", "small")
    for words in (
        "version 5 of 6",
        "6 committed, 1 of them waiting for the learner",
        "trained on 40 trajectories",
        "in flight 12.0",
        "next prompt 13",
        "stale │ 1 │ 21 │ 21",
        "quarantined files: none",
        "recoveries: 1 ",
        "learner: its process was killed; back after 4.5 s; done again: the step of version 4",
    ):
        assert words in out, out


def test_domains_are_shown_beside_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two sources, issued in turn although one was to have three times the groups of the other."""
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
    metrics = context.policies().manifest(3).metrics
    assert (metrics["groups_gcd"], metrics["groups_lcm"]) == (1.0, 1.0)
    summary = summarize(context, {}, dict.fromkeys(SHARES, 0.0), {})
    assert summary["domains"]["gcd"] == {"groups": 5, "share": 0.5, "asked": 0.75}


def test_inspect_a_version(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = trained.policies().manifest(3)
    out = shown(capsys, "inspect", "small", "3")
    for words in (
        f"by writer {manifest.writer}",
        f"parent version 2 (manifest {str(manifest.parent)[:12]})",
        f"batch 2 (commit {str(manifest.batch)[:12]}), 2 groups: 4.1, 5.0",
        "discarded 1 stale: 4.0",
        f"weights/model.safetensors │ {manifest.weights[0].size:,} │ {manifest.weights[0].sha256[:12]} │ yes",
        "learner/state.safetensors",
        "reward 0.5",
    ):
        assert words in out, out
    assert re.search(r"tokens by version 1: \d+, version 2: \d+", out)
    assert "learner state not stored with this version" in shown(capsys, "inspect", "small", "4")


def test_inspect_a_trajectory(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    question = trained.order().prompt(4).text
    out = shown(capsys, "inspect", "small", "4.1.2")
    for words in (
        "attempt 0 discarded when batch 2 was formed: stale, started under version 0, 21 response tokens",
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
    assert "committed in batch 5, waiting for the learner" in shown(capsys, "inspect", "small", "11.0.1")
    assert "in flight when batch 5, the newest, was formed" in shown(capsys, "inspect", "small", "12.0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("inspect", "small", "9"), "version 9 is not published; run 'small' has versions 0 to 5"),
        (("inspect", "small", "13.0"), "prompt 13 was not dispatched when the newest batch was committed"),
        (("inspect", "small", "4.7"), "prompt 4 has no attempt 7; it was issued as attempt 0, 1"),
        (("inspect", "small", "3.0.9"), "3.0 has samples 0 to 3; there is no sample 9"),
        (("inspect", "small", "v7"), "'v7' names neither a version (such as 7) nor a trajectory"),
        (("inspect", "nobody"), "there is no such run"),
        (("replay", "small", "0"), "version 0 was not trained from a batch"),
        (("replay", "small", "6"), "version 6 is not published; run 'small' has versions 0 to 5"),
        (("replay", "nobody"), "there is no such run"),
        (("gc", "small", "--older-than", "soon"), "'soon' is not an age; write 90s, 30m, 1h or 2d"),
        (("gc", "nobody"), "there is no such run"),
    ],
)
def test_what_does_not_exist_gets_a_sentence(
    trained: RunContext, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], sentence: str
) -> None:
    assert sentence in shown(capsys, *arguments, code=2)


def test_gc_shows_then_deletes(trained: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    stray = "policies/00000005/lost-the-race/weights/model.safetensors"
    trained.store.put(stray, b"x" * 1234)
    assert "nothing to collect that is older than 1h" in shown(capsys, "gc", "small", "--dry-run")
    out = shown(capsys, "gc", "small", "--dry-run", "--older-than", "0s")
    assert "1 objects, 1,234 bytes would be deleted (--dry-run)" in out
    assert trained.store.exists(stray)
    out = shown(capsys, "gc", "small", "--older-than", "0s")
    assert "1 objects, 1,234 bytes deleted" in out
    assert not trained.store.exists(stray)
    assert "identical" in shown(capsys, "replay", "small", "--all")


def test_inspect_shows_what_was_quarantined(
    trained: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(trained.store.uri, tmp_path / "copy")
    copy = str(tmp_path / "copy")
    batches = TrajectoryStore(open_store(copy))
    file = batches.record(5).file
    batches.run.put(file, b"not what it was")
    batches.void(5, f"{file} is not what batch 5 committed")
    out = shown(capsys, "inspect", copy)
    assert f"quarantined files: 1 batch 5: {file} is not what batch 5 committed" in out, out
    assert "5 committed, 0 of them waiting" in out
    assert "in batch 5, which was quarantined; to be issued again" in shown(capsys, "inspect", copy, "10.0")


def test_reading_a_run_needs_nothing_heavy(trained: RunContext) -> None:
    code = f"""
import sys
from rollflow.flows.cli import main
assert [main(["inspect", "{trained.uri}", *what]) for what in ([], ["3"], ["4.1.2"])] == [0, 0, 0]
assert main(["gc", "{trained.uri}", "--dry-run"]) == 0
heavy = {{"torch", "ray", "vllm", "prefect", "mlflow", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_SECONDS)
