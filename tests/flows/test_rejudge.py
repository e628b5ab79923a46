"""Tests `rollflow rejudge`, which judges the stored responses of recorded runs again, with unchanged and with changed
scorers.

Except in the last tests, the scorers judge in this process instead of in worker processes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.rejudge import choose_config
from rollflow.flows.commands.rejudge.report import conclude
from rollflow.flows.locations import attach_run
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import VersionPublished, entry_path
from rollflow.storage.objects import open_store
from rollflow.storage.records import GroupKey, Outcome, StopReason, Trajectory
from rollflow.storage.token_arrays import Float32s
from rollflow.tasks.environments.config import ImportEnvironment
from rollflow.tasks.policies.tokenizer import PolicyTokenizer
from rollflow.tasks.run import rejudge
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.rejudge import Rejudged, RejudgeReport, Rejudging, StoredVerdict
from rollflow.tasks.scorers import build_verifier
from rollflow.tasks.scorers.base import Score, Scorer, ScoreRequest, ScorerUsage
from rollflow.tasks.scorers.config import RewardConfig
from rollflow.tasks.scorers.judge.config import JudgeReward
from rollflow.tasks.scorers.routed import RoutedScorer
from rollflow.tasks.scorers.verifier import apply_threshold, score_response
from rollflow.tasks.scorers.version import compute_version
from tests.support import small_run
from tests.support.log_runs import of_kind, rebatched
from tests.support.recorded import NAMES, VERSIONS, unpack
from tests.support.small_run import prepare_small, train_small
from tests.support.user_code import put_in_reach
from tests.support.waiting import RUN_SECONDS

ROWS = {"whole": 16, "ranks": 8, "bucket": 8}  # rows of each batch


class LocalScorer(Scorer):
    """Judges with a config's verifier in this process."""

    def __init__(self, config: RewardConfig, folder: Path) -> None:
        self.usage = ScorerUsage()
        self.config, self.verify, self.tokenizer = config, build_verifier(config), PolicyTokenizer(folder)
        self.version = compute_version(config)

    async def start(self) -> None: ...

    def submit(self, requests: Sequence[ScoreRequest]) -> list[asyncio.Future[Score]]:
        futures = []
        for request in requests:
            futures.append(future := asyncio.get_running_loop().create_future())
            future.set_result(self.judge(request))
        return futures

    def judge(self, request: ScoreRequest) -> Score:
        text = self.tokenizer.decode_response(list(request.tokens), self.config.special_tokens)
        score = score_response(self.verify, self.config.answer, text, request.reference, self.config.format)
        return replace(apply_threshold(score, self.config.correct_from), version=self.version)

    async def serve(self, finished: asyncio.Event) -> None:
        await finished.wait()

    async def close(self) -> None: ...


@pytest.fixture(autouse=True)
def local(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path))
    if "soak" in request.keywords:
        return

    def build(configs: Mapping[str, RewardConfig], folder: Path, copies: object = None) -> Scorer:
        return RoutedScorer({name: LocalScorer(config, folder) for name, config in configs.items()})

    monkeypatch.setattr(rejudge, "build_scorers", build)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The recorded run with whole weights, in a store of its own; its rows have no scorer versions."""
    return unpack("whole", tmp_path / "store")


def result(capsys: pytest.CaptureFixture[str], run: Path, *options: str, code: int = 0) -> dict[str, Any]:
    assert main(["rejudge", str(run), *options, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def rows_of(run: Path, version: int) -> list[Trajectory]:
    context = attach_run(str(run))
    entry = context.policies.find(version).batch_entry
    assert entry is not None
    file = context.batches.read_commit(entry).file
    groups = TrajectoryBatch.from_bytes(context.batches.read(file)).groups()
    return [one for group in groups for one in group.trajectories]


def digest(run: Path) -> dict[str, str]:
    files = sorted(path for path in run.rglob("*") if path.is_file())
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("name", NAMES)
def test_rejudging_by_an_unchanged_scorer_changes_nothing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rewards of an earlier release, which recorded no outcomes, are included. Nothing is written to the run."""
    run = unpack(name, tmp_path / "store")
    before = digest(run)
    found = result(capsys, run, "--all")
    assert (found["same"], found["responses"], found["changed"]) == (True, ROWS[name] * VERSIONS, 0)
    assert (found["unjudged"], found["damaged"], found["changes"]) == (0, [], [])
    assert found["versions"] == [*range(1, VERSIONS + 1)]
    assert {one["before"] for one in found["outcomes"]} == {"not recorded"}
    assert found["reward_before"] == found["reward_now"]
    assert digest(run) == before


def test_changed_format_penalty_changes_only_misformatted_rows(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, context = rows_of(run, 2), attach_run(str(run))
    out = [one for one in rows if not re.fullmatch("[0-4]*", decode(context, one))]
    assert 0 < len(out) < len(rows)
    found = result(capsys, run, "2", "--set", "reward.format.pattern=[0-4]*", "--show", "100", code=1)
    assert (found["changed"], found["responses"]) == (len(out), len(rows))
    assert len(found["changes"]) == len(out)
    for change, row in zip(found["changes"], out, strict=True):
        assert change["before"]["reward"] == row.reward
        assert change["now"]["reward"] == pytest.approx(row.reward - 0.25)
        assert change["now"]["scorer_version"] != change["before"]["scorer_version"] is None
    assert found["reward_before"] == pytest.approx(sum(one.reward for one in rows) / len(rows))
    assert found["reward_now"] == pytest.approx(found["reward_before"] - 0.25 * len(out) / len(rows))
    [domain] = found["domains"].values()
    assert domain["changed"] == len(out)


def test_rejudge_tables_show_outcomes_rewards_and_reasons(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["rejudge", str(run), "--last", "2", "--set", "reward.kind=regex", "--set", "reward.pattern=.*"]
    assert main([*command, "--show", "1"]) == 1
    shown = capsys.readouterr().out
    assert "versions 2 to 3: 32 responses judged again" in shown
    assert "scorer versions in the run: not recorded (32 responses)" in shown
    for words in ("outcomes", "mean rewards", "in the run", "more changes; --show N shows more", "verdicts changed"):
        assert words in shown


@pytest.mark.parametrize(
    ("options", "versions"), [([], [3]), (["2"], [2]), (["--last", "2"], [2, 3]), (["--last", "9"], [1, 2, 3])]
)
def test_rejudge_selects_batches_by_policy_version(
    options: list[str], versions: list[int], run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert result(capsys, run, *options)["versions"] == versions


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["0"], "VERSION = 0: run 'whole' has not trained this version; give a version from 1 to 3"),
        (["9"], "VERSION = 9: run 'whole' has not trained this version; give a version from 1 to 3"),
        (["x"], "VERSION = 'x': give a whole number"),
        (["2", "--all"], "--all and VERSION exclude each other; leave one of them out"),
        (["2", "--last", "3"], "--last and VERSION exclude each other; leave one of them out"),
        (["--all", "--last", "3"], "--all and --last exclude each other; leave one of them out"),
        (["--set", "seed=3"], "--set seed=3: here only keys of [reward] and [rewards.NAME] can be set"),
        (["--set", "reward.kind=nothing"], "reward.kind"),
        (["--set", "reward.kind=import", "--set", "reward.path=no_such_module:judge"], "there is no module"),
    ],
)
def test_rejudge_refuses_bad_input(
    options: list[str], sentence: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rejudge", str(run), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("rollflow: ")
    assert sentence in error
    assert "Traceback" not in error


def test_rejudge_refuses_a_run_without_a_trained_version(
    tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut(run, version=1)
    assert main(["rejudge", str(run)]) == 2
    assert "no policy version has been trained yet; there is nothing to judge again" in capsys.readouterr().err


def cut(run: Path, version: int) -> None:
    """Cut off the log before the entry that publishes `version`, as if the run were in progress."""
    store = open_store(str(run))
    last = next(entry for entry in of_kind(store, VersionPublished) if entry.body.number == version)  # type: ignore[union-attr]
    for path in store.list("log"):
        if path >= entry_path(last.n):
            store.delete(path)


def test_rejudge_leaves_out_a_batch_that_is_not_yet_trained_on(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut(run, version=3)
    assert result(capsys, run)["versions"] == [2]


def test_rejudge_reports_a_damaged_batch_and_judges_the_others(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = run.glob("trajectories/00000001-*")
    path.write_bytes(path.read_bytes()[:-7])
    found = result(capsys, run, "--all", code=1)
    assert (found["responses"], found["changed"], found["same"]) == (2 * ROWS["whole"], 0, False)
    [damaged] = found["damaged"]
    assert damaged["version"] == 2
    assert "does not have the content that its log entry names" in damaged["why"]
    assert main(["rejudge", str(run), "2"]) == 1
    assert "1 batches could not be read" in capsys.readouterr().out


def test_rejudge_reports_a_missing_batch(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [path] = run.glob("trajectories/00000001-*")
    path.unlink()
    assert "is missing" in result(capsys, run, "2", code=1)["damaged"][0]["why"]


def test_rejudge_skips_responses_of_a_changed_prompt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stored group whose prompt id is wrong would be compared with the reference of another prompt."""
    rebatched(open_store(str(run)), 1, lambda groups: [replace(groups[0], prompt_id="sorting/x"), *groups[1:]])
    found = result(capsys, run, "2", code=1)
    assert (
        "answers the prompt 'sorting/x', but this number now means the prompt 'sorting/0000"
        in found["damaged"][0]["why"]
    )


def test_unjudged_responses_are_counted_separately(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = LocalScorer.judge, list[int]()

    def judge(self: LocalScorer, request: ScoreRequest) -> Score:
        seen.append(1)
        return Score(0.0, "the judge is away", Outcome.UNJUDGED) if len(seen) <= 5 else real(self, request)

    monkeypatch.setattr(LocalScorer, "judge", judge)
    found = result(capsys, run, code=1)
    assert (found["unjudged"], found["changed"], found["same"]) == (5, 0, False)
    assert sum(one["responses"] for one in found["outcomes"]) == ROWS["whole"] - 5
    assert found["unjudged_responses"][0]["now"]["reason"] == "the judge is away"
    seen.clear()
    assert main(["rejudge", str(run)]) == 1
    assert "5 responses could not be judged" in capsys.readouterr().out


def test_rejudge_fails_if_no_worker_process_becomes_ready(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: Scorer, finished: asyncio.Event) -> None:
        raise ConfigError("reward.kind = 'exact': 5 workers in a row did not get ready")

    monkeypatch.setattr(LocalScorer, "submit", lambda self, asked: [asyncio.Future() for _ in asked])
    monkeypatch.setattr(LocalScorer, "serve", fail)
    assert main(["rejudge", str(run)]) == 2
    assert "workers in a row did not get ready" in capsys.readouterr().err


def test_rejudge_refuses_rewards_computed_by_an_environment(run: Path) -> None:
    context = attach_run(str(run))
    config = context.config.model_copy(update={"environment": ImportEnvironment(path="own.games:Game")})
    with pytest.raises(ConfigError, match=r"environment\.kind = 'import': the environment computed the rewards"):
        Rejudging(context, config)


def test_rejudge_refuses_rows_whose_scorer_was_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = attach_run(str(run))
    rejudging = Rejudging(context, context.config)
    real = rejudging._prompts.prompt
    monkeypatch.setattr(rejudging._prompts, "prompt", lambda index: replace(real(index), scorer="gone"))
    sentence = r"rewards\.gone: prompts of the run name this scorer, but the config has only reward; add the section"
    with pytest.raises(ConfigError, match=sentence):
        rejudging.read_verdicts(2)


async def test_each_response_goes_to_the_scorer_of_its_prompt(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = attach_run(str(run))
    config = context.config
    source = config.prompts[0].model_copy(update={"reward": "far"})
    far = choose_config(config, ["reward.format.pattern=none"]).reward
    both = config.model_copy(update={"prompts": (config.prompts[0], source), "rewards": {"far": far}})
    rejudging = Rejudging(context, both)
    real = rejudging._prompts.prompt
    monkeypatch.setattr(rejudging._prompts, "prompt", lambda n: replace(real(n), scorer="far" if n % 2 else ""))
    report = RejudgeReport("whole", 100)
    await rejudging.run([2], report, lambda *far: None)
    assert report.changes
    assert all(one.stored.key.prompt % 2 for one in report.changes)
    assert len(report.total.scorers_now) == 2


def test_pairwise_judge_compares_stored_responses_of_a_prompt(run: Path) -> None:
    """As in the run, a response is compared with the other kept responses of its group."""
    context = attach_run(str(run))
    judge = JudgeReward(url="http://127.0.0.1:1/v1", model="m", mode="pairwise")
    verdicts = Rejudging(context, context.config.model_copy(update={"reward": judge})).read_verdicts(2)
    for one in verdicts:
        responses = [list(other.request.tokens) for other in verdicts if other.key == one.key]
        assert len(responses) > 1
        assert sorted([list(one.request.tokens), *map(list, one.request.peers)]) == sorted(responses)
    assert not any(one.request.peers for one in Rejudging(context, context.config).read_verdicts(2))


# --- what counts as a change ---------------------------------------------------------------------------------------


def rejudged(before: dict[str, Any], now: Score) -> Rejudged:
    made = Trajectory(
        0, 0, (1,), (True,), (0.0,), (0,), **{"reward": 1.0, "reason": "", **before}, ending=StopReason.STOP
    )
    return Rejudged(StoredVerdict(1, GroupKey(3, 0), "d", made, ScoreRequest((1,), {})), now)


OLD, NEW = "0" * 12, "f" * 12


@pytest.mark.parametrize(
    ("before", "now", "changed", "flip"),
    [
        ({}, Score(1.0, "other words"), False, False),
        ({"reward": 0.10000000149011612}, Score(0.1), False, False),  # 0.1 as float32
        ({"reward": 0.25}, Score(0.1), True, False),
        ({"outcome": Outcome.CORRECT}, Score(1.0, outcome=Outcome.PARTIAL), True, False),
        ({"outcome": None}, Score(1.0, outcome=Outcome.PARTIAL), False, False),
        ({"outcome": Outcome.UNJUDGED, "reward": 0.0}, Score(0.0), True, False),
        ({}, Score(0.0, outcome=Outcome.UNJUDGED), False, False),
        ({"scorer_version": OLD}, Score(0.0, version=NEW), True, False),
        ({"scorer_version": OLD}, Score(0.0, version=OLD), True, True),
        ({"scorer_version": OLD}, Score(1.0, version=OLD), False, False),
        ({"token_rewards": Float32s.of([0.1])}, Score(1.0, token_values=Float32s.of([0.1])), False, False),
        ({"token_rewards": Float32s.of([0.1])}, Score(1.0, token_values=Float32s.of([0.2])), True, False),
        ({"token_rewards": Float32s.of([0.1])}, Score(1.0), True, False),
        ({}, Score(1.0, token_values=Float32s.of([math.nan])), False, False),
        ({"scorer_version": OLD}, Score(1.0, token_values=Float32s.of([0.5]), version=OLD), True, True),
        # the judge was not reachable during the run
        ({"scorer_version": OLD, "outcome": Outcome.UNJUDGED, "reward": 0.0}, Score(1.0, version=OLD), True, False),
    ],
)
def test_change_of_outcome_reward_or_token_rewards_is_counted(
    before: dict[str, Any], now: Score, changed: bool, flip: bool
) -> None:
    one = rejudged(before, now)
    assert (one.has_changed, one.is_flip) == (changed, flip)


def test_changes_between_right_and_wrong_are_counted_separately() -> None:
    report = RejudgeReport("r", 5)
    for version in (OLD, OLD, NEW):
        report.add(rejudged({"scorer_version": OLD}, Score(0.0, version=version)))
    assert conclude(report) == (
        "3 of 3 verdicts changed; 2 of them by the same version of the scorer, which is not deterministic"
    )


# --- with worker processes -----------------------------------------------------------------------------------------

OWN = """
from rollflow.tasks.scorers.base import Score

def judge(response: str, reference: dict[str, object]) -> Score:
    right = len(response) % 2 == 0
    return Score(float(right), f"{len(response)} characters")
"""


@pytest.mark.soak
@pytest.mark.slow
def test_rejudge_finds_the_rows_that_a_changed_scorer_affects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run by a user-defined scorer: judged again with the same file, with a changed file, and by the command line."""
    (file := tmp_path / "lengths.py").write_text(OWN)
    put_in_reach(monkeypatch, tmp_path)
    context = prepare_small(tmp_path, versions=2, reward={"kind": "import", "path": "lengths:judge"})
    monkeypatch.setattr(small_run, "trajectory", judged_by_file(context, small_run.trajectory))
    train_small(context)
    unchanged = command(tmp_path, context, "--all")
    assert (unchanged.returncode, unchanged.stderr) == (0, "")
    assert json.loads(unchanged.stdout)["changed"] == 0

    texts = [decode(context, one) for version in (1, 2) for one in rows_of(Path(context.uri), version)]
    longest = max(map(len, texts))
    planted = sum(len(text.strip()) == longest for text in texts)
    file.write_text(OWN.replace("% 2 == 0", f"% 2 == (len(response) == {longest})"))
    changed = command(tmp_path, context, "--all", "--show", "100")
    found = json.loads(changed.stdout)
    assert changed.returncode == 1
    assert 0 < found["changed"] == planted < len(texts)
    assert {len(one["response"].strip()) for one in found["changes"]} == {longest}
    assert found["flips"] == 0  # the file of the scorer has another hash, so the scorer has another version


def decode(context: RunContext, one: Trajectory) -> str:
    tokens = [token for token, own in zip(one.tokens, one.loss_mask, strict=True) if own]
    return context.tokenizer.decode_response(tokens, context.config.reward.special_tokens).strip()


def judged_by_file(context: RunContext, build: Any) -> Any:
    """Return a function that builds a trajectory with the verdict of the run's scorer."""
    scorer = LocalScorer(context.config.reward, context.policy_folder)

    def trajectory(*given: Any) -> Trajectory:
        one: Trajectory = build(*given)
        tokens = [token for token, own in zip(one.tokens, one.loss_mask, strict=True) if own]
        score = scorer.judge(ScoreRequest(tokens, {}))
        more = {"outcome": score.outcome, "scorer_version": score.version}
        return replace(one, reward=score.value, reason=score.reason, **more)

    return trajectory


def command(home: Path, context: RunContext, *options: str) -> subprocess.CompletedProcess[str]:
    rollflow = [sys.executable, "-m", "rollflow.flows.commands.cli", "rejudge", context.uri, *options, "--json"]
    return subprocess.run(rollflow, capture_output=True, text=True, timeout=RUN_SECONDS, check=False)


@pytest.mark.soak
@pytest.mark.slow
def test_rejudge_command_finds_no_change_of_a_recorded_run(run: Path) -> None:
    context = attach_run(str(run))
    found = command(run, context, "--all")
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["same"]
