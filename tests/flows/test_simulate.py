"""Tests `rollflow plan` without `--gpus`: table, files, hardware from a recorded run, and errors for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollflow.flows.commands.cli import main
from rollflow.flows.commands.cli.prediction import read_recorded
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.config import SHIPPED_HARDWARE, load_hardware, load_recipe
from rollflow.flows.locations import context_of
from rollflow.flows.views.timelines.timeline import build_drawing
from rollflow.storage.log.entries import BatchCommitted, VersionPublished
from rollflow.storage.log.run_log import Log, Writer
from rollflow.storage.objects import open_store
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import GroupKey, StopReason, Trajectory, TrajectoryGroup
from rollflow.storage.run_records.updates import Update, read_update, store_update
from rollflow.storage.trajectories import StagedBatch, TrajectoryStore
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.records import Span
from rollflow.tasks.simulation.timeline import Timeline
from tests.support.described import describe
from tests.support.refused import refused

RECIPE = "flows/recipes/sorting.toml"
SMALL = ("--set", "groups=8", "--set", "group_size=4", "--versions", "6")
FILE = """
[engines]
count = 2
max_concurrent_requests = 8
seconds_per_token = 0.1

[responses]
median = 20

[learner]
seconds_per_version = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "hardware.toml"
    path.write_text(FILE)
    return path


def test_printed_plan_equals_its_json_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, file: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", RECIPE, "--hardware", str(file), *SMALL, "--json", str(tmp_path / "figures.json")]) == 0
    out = capsys.readouterr().out
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["versions"] == 6
    assert figures["bias"]["trained"] == 6 * 32
    assert f"{figures['step_seconds']:,.4g} s" in out
    for word in ("throughput", "idle", "staleness", "wasted", "length bias", "no schedule below", "Proposition 2"):
        assert word in out
    assert figures["step_seconds"] >= figures["bounds"]["conserving_split"] * 0.9


def test_timeline_files_are_self_contained(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "timeline"
    assert main(["plan", RECIPE, "--hardware", str(file), *SMALL, "--plot", str(out)]) == 0
    assert out.with_suffix(".png").read_bytes()[:4] == b"\x89PNG"
    page = out.with_suffix(".html").read_text()
    assert "http" not in page
    assert " src=" not in page
    data = json.loads(page.split("const D = ", 1)[1].split(";\n", 1)[0])
    assert data["engines"] == data["rows"] == 2
    assert [version for _, _, version in data["steps"]] == [1, 2, 3, 4, 5, 6]
    assert [len(curve["values_B"]) for curve in data["curves"]] == [data["bins"]] * 2


def test_timeline_row_shows_the_mean_of_several_engines() -> None:
    """The expected values are computed by hand for three engines in two rows and two time bins of 5 s."""
    engines = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.25]], np.float32)
    span = Span(1, 2.0, 9.0)
    timeline = Timeline(5.0, engines, np.array([3.0, 10.0], np.float32), [span], [], slots=8)
    drawn = build_drawing(timeline, "title", most_rows=2)
    assert drawn.rows_RB.tolist() == [[0.75, 0.25], [0.0, 0.25]]
    assert (drawn.label, drawn.seconds, drawn.slots, drawn.steps) == ("3 engines\nin 2 rows", 10.0, 8, [span])
    verdicts, busy = drawn.curves
    assert (verdicts.values_B.tolist(), verdicts.top) == ([3.0, 10.0], 11.0)
    assert (busy.values_B.tolist(), busy.top) == ([50.0, 25.0], 100.0)
    assert build_drawing(timeline, "title", most_rows=3).label == "3 engines"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engines]\ncuont = 3", ["engines.cuont = 3", "no such key", "did you mean engines.count?"]),
        (
            "[engines]\nmax_concurrent_requests = 0",
            ["engines.max_concurrent_requests = 0", "less than or equal to the minimum of 0"],
        ),
        ("[responses]\ncorrelation = 2", ["responses.correlation = 2", "greater than the maximum of 1"]),
        ("[engines]\nspeeds = [1.0, -1.0]", ["engines.speeds = [1.0, -1.0]", "above 0"]),
        ("[learner]\ncolocated = true", ["learner.colocated = True", "async_ratio = 1", "async_ratio = 0"]),
        ("[faults]\ndeaths = [{ at_seconds = 1, engine = 9 }]", ["faults.deaths.engine = 9", "name one from 0 to 0"]),
        ("engines = = 1", ["not valid TOML", "correct that line"]),
    ],
)
def test_bad_hardware_file_gets_a_one_sentence_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, words: list[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    sentence = refused(capsys, "plan", RECIPE, "--hardware", str(path), *SMALL)
    assert all(word in sentence for word in words), sentence


def test_bad_plan_options_are_refused(capsys: pytest.CaptureFixture[str], file: Path, tmp_path: Path) -> None:
    assert "'nowhere.toml' cannot be read" in refused(capsys, "plan", RECIPE, "--hardware", "nowhere.toml")
    assert "must end in .png or .html" in refused(capsys, "plan", RECIPE, "--hardware", str(file), "--plot", "a.svg")
    assert "does not exist; create the folder" in refused(
        capsys, "plan", RECIPE, "--hardware", str(file), "--json", str(tmp_path / "no" / "x.json")
    )
    with pytest.raises(SystemExit):
        main(["plan", RECIPE])
    with pytest.raises(SystemExit):
        main(["plan", RECIPE, "--hardware", str(file), "--versions", "0"])


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED_HARDWARE.glob("*.toml")))
def test_shipped_hardware_file_is_found_by_name(name: str) -> None:
    assert load_hardware(Path(name)) == load_hardware(SHIPPED_HARDWARE / f"{name}.toml")


@pytest.mark.long
def test_simulated_synchronous_step_has_published_time_shares() -> None:
    """RollPacker's shares of a synchronous step in maths: 72 % rollout, 5 % reward, 23 % training."""
    from rollflow.tasks.simulation.world import simulate

    recipe = load_recipe(Path("flows/recipes/rlvr.toml"), ["async_ratio=0"])
    shares = simulate(recipe, load_hardware(Path("rlvr-128-colocated")), versions=3).figures.shares
    assert shares is not None
    assert shares.rollout == pytest.approx(0.72, abs=0.04)
    assert shares.reward == pytest.approx(0.05, abs=0.02)
    assert shares.train == pytest.approx(0.23, abs=0.03)


def test_keys_lists_hardware_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "--hardware"]) == 0
    out = capsys.readouterr().out
    assert "engines.batch_slowdown = 0.0  # number at least 0: slowdown c by other requests" in out
    assert "group_size" not in out


def test_hardware_file_is_unchanged_after_write_and_read(tmp_path: Path) -> None:
    deaths = [{"at_seconds": 1.5, "engine": 0}]
    parts = {
        "engines": {"max_concurrent_requests": 3},
        "learner": {"measured": [1.0, 2.5]},
        "faults": {"deaths": deaths},
    }
    hardware = Hardware.model_validate({"title": 'an "odd" name', **parts})
    path = tmp_path / "written.toml"
    path.write_text(to_toml(hardware.model_dump(exclude_defaults=True)))
    assert load_hardware(path) == hardware


# --- a recorded run -----------------------------------------------------------------------------------------

GENERATION, REWARD, TRAIN, PAUSE = 0.5, 0.25, 2.0, 0.125
STEP = GENERATION + REWARD + TRAIN + PAUSE


def group(number: int, index: int) -> TrajectoryGroup:
    def one(sample: int) -> Trajectory:
        tokens = 5 + index % 3
        ones = (True,) * tokens
        return Trajectory(
            sample, number, (1,) + (7,) * tokens, (False, *ones), (0.0,) + (-1.0,) * tokens, (-1,) + (number,) * tokens,
            0.0, "", StopReason.STOP, GENERATION, REWARD,
        )  # fmt: skip

    return TrajectoryGroup(GroupKey(index, 0), f"p{index}", "d", tuple(one(sample) for sample in range(4)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A synchronous run of 12 versions. The recorded time of a step is the sum of generation, reward, training and
    update.
    """
    return recorded(tmp_path, 12)


def recorded(folder: Path, versions: int) -> Path:
    """Write the log of such a run, whose clock advances by one step with each version. Return the run's folder."""
    recipe = load_recipe(Path(RECIPE), ["groups=2", "group_size=4", "async_ratio=0", "versions=12"])
    path = folder / "store" / "runs" / "recorded"
    store = open_store(str(path))
    describe(store, "recorded", recipe, probe_tokens=(1,))
    log = Log(store)
    log.claim("supervisor")
    scheduler, learner = log.claim("scheduler"), log.claim("learner")
    with pytest.MonkeyPatch.context() as clock:
        for version in range(versions + 1):
            clock.setattr("time.time", lambda now=1000.0 + version * STEP: now)
            batch = commit(log, scheduler, version - 1) if version else None
            at = publish(log, learner, version, batch)
            store_update(store, Update(version, PAUSE, at + PAUSE))
    return path


def commit(log: Log, scheduler: Writer, number: int) -> BatchCommitted:
    prompts = (2 * number, 2 * number + 1)
    staged = StagedBatch(number, tuple(group(number, prompt) for prompt in prompts), prompts)
    store = TrajectoryStore(log)
    return store.read_commit(store.commit(scheduler, staged)[0].n)


def publish(log: Log, learner: Writer, version: int, batch: BatchCommitted | None) -> float:
    """Publish a version that was trained on `batch`; return the time."""
    policies, metrics, entry = PolicyStore(log), dict[str, float](), None
    if batch is not None:
        entry = log.state.waiting[batch.number].entry
        metrics = {"wait_seconds": STEP - TRAIN, "step_seconds": TRAIN, "publish_seconds": 0.0}
        metrics["response_tokens"] = float(sum(group.tokens for group in batch.groups))
    weights = policies.stage(learner, version, {"weights/model.safetensors": b"w"})
    state = policies.stage(learner, version, {"learner/state.safetensors": b"s"})
    return policies.publish(learner, VersionPublished(version, entry, weights, state, metrics=metrics)).at


@pytest.mark.long
def test_simulation_predicts_a_recorded_run(capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path) -> None:
    found = read_recorded(context_of(str(run.parent.parent), "recorded"))
    assert [one.version for one in found] == list(range(3, 13))
    assert found[0].seconds == pytest.approx(STEP)
    assert found[0].pause == PAUSE
    assert found[0].fetched == pytest.approx(0.0, abs=1e-9)
    assert np.mean(found[0].generation_R) == GENERATION
    assert set(found[0].tokens_R) == {6, 7}
    recipe = ["--set", "groups=2", "--set", "group_size=4", "--set", "async_ratio=0", "--set", "versions=12"]
    fit = tmp_path / "fit.toml"
    assert main(["plan", RECIPE, *recipe, "--from-run", str(run), "--save-hardware", str(fit)]) == 0
    out = capsys.readouterr().out
    assert "measured 2.875 s in run recorded (median of 10 versions)" in out
    assert "predicted" in out
    assert "simulated step: alpha 0" in out
    assert "set async_ratio = " in out.rpartition("simulated step")[2]
    assert load_hardware(fit).update.seconds == PAUSE


@pytest.mark.soak
@pytest.mark.long
def test_plan_does_not_compare_with_a_run_of_another_recipe(capsys: pytest.CaptureFixture[str], run: Path) -> None:
    assert main(["plan", RECIPE, "--from-run", str(run), "--set", "groups=4", "--versions", "5"]) == 0
    out = capsys.readouterr().out
    assert "the run had another groups" in out
    assert "%" not in out.rpartition("step time")[2].partition("on this machine")[0]


def test_plan_refuses_a_run_with_too_few_versions(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    short = recorded(tmp_path, 5)
    assert "has only 5 versions, but a prediction needs at least 8" in refused(
        capsys, "plan", RECIPE, "--from-run", str(short)
    )


def test_missing_record_of_a_weight_update_is_read_as_none(run: Path) -> None:
    assert read_update(open_store(str(run)), 99) is None
    assert read_update(open_store(str(run)), 3) == Update(3, PAUSE, pytest.approx(1000.0 + 3 * STEP + PAUSE))
