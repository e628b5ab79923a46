"""Tests that `rollflow log --rates` prints each asked question with its pass rate, and that its output is a prompt file
with difficulties.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.log import describe_entry
from rollflow.flows.config import parse_config
from rollflow.flows.views.summary import _list_skipped
from rollflow.storage.log.entries import EpochStarted
from rollflow.tasks.prompts.epochs import list_epochs, share_skipped
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.prompt_check import read_files
from tests.support.epoch_run import make_epoch_run
from tests.support.log_runs import of_kind
from tests.support.small_run import prepare_small

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        yield make_epoch_run(home)


def test_logged_pass_rates_can_select_prompts_by_difficulty(
    finished: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rated.jsonl"
    capsys.readouterr()
    assert main(["log", "epochs", "--rates"]) == 0
    path.write_text(capsys.readouterr().out)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == len({row["question"] for row in rows}) == 9
    assert {row["pass_rate"] for row in rows} == {0.0, 1.0}
    assert all(row["correct"] == row["pass_rate"] * row["responses"] for row in rows)
    assert sum(row["responses"] for row in rows) == 4 * 40
    source = {"kind": "jsonl", "path": str(path), "held_out": 0.1, "difficulty": {"max": 0.9}}
    [found] = read_files(parse_config({"prompts": [source], "reward": {"kind": "exact"}}), read_file).values()
    assert len(found) == 9


def test_option_rates_for_an_untrained_run_is_refused(
    finished: RunContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_small(tmp_path, "fresh")
    assert main(["log", "fresh", "--rates"]) == 2
    assert "its log has no pass rates; name a run that has trained" in capsys.readouterr().err


def test_share_of_skipped_questions_is_reported_by_epoch(finished: RunContext) -> None:
    epochs = list_epochs(finished.log, 0)
    assert [epoch.number for epoch in epochs] == list(range(len(epochs)))
    shares = _list_skipped(finished)["questions"]
    assert shares == {epoch.number: round(len(epoch.skipped) / 9, 4) for epoch in epochs}
    newest = share_skipped(finished.log.state, ["questions"])
    assert newest == {"questions": len(epochs[-1].skipped) / 9}
    entry = of_kind(finished.store, EpochStarted)[1]
    asked, skipped = epochs[1].asked, len(epochs[1].skipped)
    shown = f"epoch 1 of source 0 started: {asked} questions, {skipped} solved questions are skipped"
    assert describe_entry(entry) == shown
