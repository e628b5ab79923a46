"""The example of docs/own_parts.md as a whole: its recipe is checked, prepared, and run with each of its parts.

The policy is random, the engine is timed, and versions are made synchronously in this process, without Ray.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollflow.flows.commands import run
from rollflow.flows.commands.cli import main
from rollflow.flows.config import load_recipe, parse_config
from rollflow.flows.locations import context_of, store_uri
from rollflow.flows.prepare import prepare
from rollflow.flows.views.compare import diff_configs, read_compared
from rollflow.storage.audit.audit import audit
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.token_arrays import ANY_TOKEN
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.actors.learner import LearnerActor
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.runnable import CPU_HEAD_SIZES
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.environments import build_environment
from rollflow.tasks.objectives.imported import ImportedObjective
from rollflow.tasks.policies.vocabulary import read_vocabulary
from rollflow.tasks.rollout.proxy import InferenceProxy, WeightsProbe
from rollflow.tasks.rollout.resuming.resume_point import ResumePoint
from rollflow.tasks.rollout.scheduler import RolloutScheduler, SchedulerPorts
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.expectations import expected_of
from rollflow.tasks.run.limits import build_limits
from rollflow.tasks.run.user_code import changed_code, describe_changed_code
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.pool import RewardPool
from rollflow.tasks.scorers.verifier import score_response
from tests.support.small_run import StoreFeed, make_policy
from tests.support.user_code import FOLDER, put_in_reach

RECIPE = FOLDER / "letters.toml"
VERSIONS = 3
PRIZE = """
from rollflow.tasks.scorers.base import Score

def prize(response, reference) -> Score:
    return Score({prize}, "a prize")
"""


@pytest.fixture(autouse=True)
def _reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    put_in_reach(monkeypatch, FOLDER)


def small(folder: Path) -> dict[str, Any]:
    """Return the recipe with a smaller policy, engine and size, but the same parts."""
    make_policy(folder / "policy")
    tree = tomllib.loads(RECIPE.read_text())
    return tree | {
        "policy": {"path": str(folder / "policy")},
        "engine": {"kind": "timed", "max_new_tokens": 24, "seconds_per_token": 1e-4},
        "versions": VERSIONS,
        "groups": 4,
        "async_ratio": 0,
        "evaluation": {"prompts": 4},
    }


class RolledFeed(StoreFeed):
    """Batches that the run's own rollout makes when the learner asks for them."""

    def lease(self, number: int, deadline: float, *, afresh: bool = False) -> pa.Buffer:
        """Return the batch of the newest version."""
        if number not in self.log.state.waiting and number < self.until:
            asyncio.run(self._roll(number))
        return super().lease(number, deadline, afresh=afresh)

    async def _roll(self, number: int) -> None:
        config = self.context.config.model_copy(update={"versions": number + 1})
        assert isinstance(config.engine, TimedEngineConfig)
        engine = TimedEngine(config.engine)
        await engine.start()
        proxy = InferenceProxy([engine], config.engine.max_concurrent_requests)
        await proxy.update(number, Path(), WeightsProbe((), (), 0.0), "continue")
        async with self._pool() as pool:

            async def score(request: ScoreRequest) -> Score:
                return (await pool.score([request]))[0]

            async def commit(staged: StagedBatch) -> None:
                self.batches.commit(self.writer, staged)

            environment = build_environment(config.environment)
            ports = SchedulerPorts(self.context.prompts().prompt, score, commit, environment=environment)
            resume = ResumePoint.of_state(self.log.state)
            await RolloutScheduler(build_limits(config), ports, proxy, resume).run()
        await engine.close()

    @asynccontextmanager
    async def _pool(self) -> AsyncIterator[RewardPool]:
        pool = RewardPool(self.context.config.reward, self.context.policy_folder)
        await pool.start()
        try:
            yield pool
        finally:
            await pool.close()


def batches(context: RunContext) -> list[TrajectoryBatch]:
    found = [context.policies.find(version).batch_entry for version in range(1, VERSIONS + 1)]
    files = [context.batches.read_commit(entry).file for entry in found if entry is not None]
    return [TrajectoryBatch.from_bytes(context.batches.read(file)) for file in files]


def test_recipe_of_the_user_code_example_is_valid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(RECIPE)]) == 0
    assert "letters.toml: good." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "reward.path=letters.rewards:far",
            "reward.path = 'letters.rewards:far': the module letters.rewards has",
        ),
        ("prompts.0.path=letters:Counts", "prompts.path = 'letters:Counts': the module letters has no Counts"),
        ("train.objective.options={lid=1}", "train.objective.options = {'lid': 1}: "),
        (
            "environment.options={}",
            "environment.options = {}: letters.environments:SecondThought failed with TypeError",
        ),
    ],
)
def test_missing_user_code_is_reported_before_a_run(
    capsys: pytest.CaptureFixture[str], override: str, words: str
) -> None:
    assert main(["check", str(RECIPE), "--set", override]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"rollflow: {words}")


def test_example_policy_has_a_head_size_with_engine_kernels() -> None:
    """The example's policy has engine kernels on a CPU; without them, a run would fail only after minutes."""
    cold = load_recipe(RECIPE, []).policy.cold_start
    assert cold is not None
    assert cold.hidden_size // cold.heads in CPU_HEAD_SIZES


def test_verifier_example_in_the_docs_gives_partial_rewards(caplog: pytest.LogCaptureFixture) -> None:
    """Run the code on the page; its error is logged as a warning."""
    page = (FOLDER.parent / "own_parts.md").read_text()
    made: dict[str, Any] = {}
    exec(page.split("```python\n")[1].split("```")[0], made)
    closeness = made["closeness"]
    assert score_response(closeness, "all", " 41", {"answer": "42"}).value == 0.5
    assert score_response(closeness, "all", "no", {"answer": "42"}).reason == "not a number"
    assert not caplog.records
    assert score_response(closeness, "all", "41", {}).value == 0.0
    said = "a response gets a reward of 0, as its verifier failed: KeyError: 'answer'"
    assert [record.getMessage() for record in caplog.records] == [said]


def test_run_uses_all_of_its_user_defined_parts(tmp_path: Path) -> None:
    context = prepare(parse_config(small(tmp_path)), "letters")
    actor = LearnerActor(context, channel=RolledFeed(context))
    assert actor.run() == VERSIONS
    assert isinstance(actor.learner.objective, ImportedObjective)
    assert audit(context.store).clean
    rows = [row for batch in batches(context) for row in batch.table.to_pylist()]
    assert {row["reason"] for row in rows} >= {"not a number"}  # the verifier
    assert len({row["reward"] for row in rows}) > 2
    assert {row["domain"] for row in rows} == {"letters"}  # the prompts
    hinted = [row for row in rows if False in row["loss_mask"][row["loss_mask"].index(True) :]]
    assert hinted  # the environment
    for row in hinted:
        between = row["loss_mask"].index(False, row["loss_mask"].index(True))
        assert row["tokens"][between] == 32
    first, last = (context.weights(version) for version in (0, VERSIONS))
    assert {file.read_bytes() for file in first.iterdir()} != {file.read_bytes() for file in last.iterdir()}


def test_resume_without_user_defined_parts_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollflow.flows.commands.run.drive", lambda context: 0)
    prepare(parse_config(small(tmp_path)), "letters")
    assert main(["resume", "letters"]) == 0
    for name in [name for name in sys.modules if name.partition(".")[0] == "letters"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(FOLDER)])
    assert main(["resume", "letters"]) == 2
    assert "rollflow: reward.path = 'letters.rewards:near': there is no module letters" in capsys.readouterr().err


def test_prompt_source_with_changed_questions_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from letters import prompts as own  # type: ignore[import-not-found]

    context = prepare(parse_config(small(tmp_path)), "letters")
    context.prompts()
    monkeypatch.setattr(own.LetterCounts, "_drawn", lambda self, *place: own.Question(str(place), "1", {"answer": "1"}))
    with pytest.raises(
        ConfigError, match=r"prompts\.path = .* the source asks other questions than when the run began"
    ):
        context.prompts()


def test_audit_skips_prompts_of_a_changed_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changed source has the same first questions, so the run may continue; earlier batches may have others."""
    context = prepare(parse_config(small(tmp_path)), "letters")
    assert expected_of(context).is_thorough
    monkeypatch.setattr("rollflow.tasks.run.user_code.code_of", lambda key, part: "another file")
    expected = expected_of(context)
    assert "prompts.0.path: the file has changed since the run's start" in expected.unchecked
    assert expected.prompts is None


@pytest.mark.parametrize(
    ("config", "size"), [({"vocab_size": 320}, 320), ({"text_config": {"vocab_size": 9}}, 9), ({}, ANY_TOKEN)]
)
def test_environment_tokens_outside_the_vocabulary_are_refused(
    tmp_path: Path, config: dict[str, Any], size: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_vocabulary(tmp_path) == size


def test_hash_of_user_code_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "prizes.py"
    module.write_text(PRIZE.format(prize=1.0))
    put_in_reach(monkeypatch, tmp_path)
    config = parse_config(small(tmp_path) | {"reward": {"kind": "import", "path": "prizes:prize"}})
    created = prepare(config, "first").created
    assert set(created.own_code) == {"reward", "train.objective", "environment", "prompts.0"}
    assert created.own_code["reward"] == sha256(module.read_bytes()).hexdigest()
    assert changed_code(config, created.own_code) == []
    assert changed_code(config, {}) == []  # an older run recorded no hashes

    module.write_text(PRIZE.format(prize=2.0))
    assert changed_code(config, created.own_code) == ["reward"]
    monkeypatch.setattr(run, "drive", lambda context: 0)
    assert main(["resume", context_of(store_uri(config), "first").uri]) == 0
    assert "reward.path: the file has changed since the run's start" in capsys.readouterr().err
    contexts = [context_of(store_uri(config), "first"), prepare(config, "second")]
    differs = diff_configs(read_compared(contexts))["reward.path, its file"]
    assert [len(set(differs)), len(differs[0])] == [2, 12]


def test_changed_file_of_a_foreign_environment_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = tmp_path / "worlds" / "rooms.py"
    module.parent.mkdir()
    module.write_text("class Room:\n    def reset(self): ...\n")
    section = {"kind": "trl", "path": "worlds.rooms:Room", "folder": str(tmp_path)}
    config = parse_config(small(tmp_path) | {"environment": section})
    context = prepare(config, "first")
    assert context.created.own_code["environment"] == sha256(module.read_bytes()).hexdigest()
    assert describe_changed_code(config, context.created.own_code) == []
    module.write_text("class Room:\n    def reset(self): return 'another room'\n")
    assert changed_code(config, context.created.own_code) == ["environment"]
    main(["audit", context.uri])
    assert "environment.path: the file has changed since the run's start\n" in capsys.readouterr().err
    module.unlink()
    assert changed_code(config, context.created.own_code) == []  # a machine without the file cannot compare it
