"""Tests the frames (what an environment renders) of a replayed episode, in `rollflow inspect --frames` and on the page
of a run.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rollflow.flows.commands.cli import main
from rollflow.flows.views.frames import page_frames
from rollflow.flows.views.frames.page_frames import COLOURS
from rollflow.flows.views.frames.pictures import place_frames, write_png
from rollflow.flows.views.frames.replaying import CHANGED, replay_frames
from rollflow.flows.views.inspect_values import write_newest_episodes
from rollflow.flows.views.turns import TurnPart, split_turns
from rollflow.storage.errors import ConfigError
from rollflow.storage.records import GroupKey, StopReason, Trajectory
from rollflow.storage.trajectories import StagedBatch
from rollflow.tasks.engines.base import Generation, TokenSpan
from rollflow.tasks.environments import build_environment, close_environment
from rollflow.tasks.environments.config import EnvironmentConfig, GymnasiumEnvironment, MixedEnvironment
from rollflow.tasks.environments.foreign import frames as foreign_frames
from rollflow.tasks.environments.foreign import world as foreign_world
from rollflow.tasks.environments.foreign.frames import NO_REPLAY, RENDERS_NOTHING, Frame, FrameTaker, read_frame
from rollflow.tasks.environments.guest import frames as guest_frames
from rollflow.tasks.environments.guest.frames import EXPECTED, pack_frame
from rollflow.tasks.environments.guest.wire import LONGEST_LINE, pack_line
from rollflow.tasks.rollout.episode import PlayedEpisode, Turn
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.run.episode_ports import build_ports
from rollflow.tasks.scorers.base import Score, ScoreRequest
from tests.environments.worlds import GUESTS, call, trl
from tests.support import small_run
from tests.support.refused import refused
from tests.support.small_run import prepare_small, train_small

KEY = GroupKey(0, 0)
SEEDS = {"kind": "seeds", "question": "{seed}:", "row": {"answer": "1"}}
LAKE = {"left": 0, "down": 1, "right": 2, "up": 3}
WAY = ["down", "down", "right", "right", "down", "right"]


def drawn(name: str = "Drawn", **options: Any) -> GymnasiumEnvironment:
    """Return the config of a test environment (a walk) that renders its states."""
    return GymnasiumEnvironment(path=f"rendered_worlds:{name}", folder=str(GUESTS), options=options)


def with_environment(context: RunContext, environment: EnvironmentConfig) -> RunContext:
    """Return a copy of a run whose config has another environment and allows long responses. Only its config, prompts
    and tokenizer can be read.
    """
    engine = context.config.engine.model_copy(update={"max_new_tokens": 2000})
    config = context.config.model_copy(update={"environment": environment, "engine": engine})
    found: Any = SimpleNamespace(config_at=lambda _: config, prompts=context.prompts, tokenizer=context.tokenizer)
    return found


def record(context: RunContext, responses: Sequence[str], prompt: int = 0, sample: int = 0) -> list[Trajectory]:
    """Play an episode as a run does, with these responses, and return its trajectories."""
    config, tokenizer = context.config_at(0), context.tokenizer

    async def ask(turn: Turn) -> VersionedGeneration:
        tokens = tokenizer.encode_response(responses[min(turn.number, len(responses) - 1)])
        span = TokenSpan.of(tokens, [-1.0] * len(tokens), [0] * len(tokens))
        return VersionedGeneration(Generation("", span, StopReason.STOP), 0)

    async def keep(_: PlayedEpisode) -> bool:
        return True

    async def judge(_: ScoreRequest) -> Score:
        return Score(0.25)

    async def play() -> list[Trajectory]:
        environment, longest = build_environment(config.environment), config.engine.max_new_tokens
        ports = build_ports(config, tokenizer)
        episode = PlayedEpisode(context.prompts().prompt(prompt), longest, ask, keep, judge, ports=ports)
        try:
            score = await episode.play(environment)
        finally:
            await close_environment(environment)
        assert score is not None
        return list(episode.trajectories(score, sample, small_run.SIZE))

    return asyncio.run(play())


def replay(context: RunContext, environment: EnvironmentConfig, *responses: str, seconds: float = 60) -> FrameTaker:
    """Record an episode, and replay it."""
    run = with_environment(context, environment)
    return replay_frames(run, KEY, record(run, responses), FrameTaker(), seconds)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunContext]:
    """Make a run of one version in an environment with pictures."""
    home = tmp_path_factory.mktemp("home")

    def batch(context: RunContext, number: int, **_: Any) -> StagedBatch:
        staged = made(context, number)
        groups = [
            replace(
                group,
                trajectories=tuple(
                    one for t in group.trajectories for one in record(context, ["1"], group.key.prompt, t.sample)
                ),
            )
            for group in staged.groups
        ]
        return replace(staged, groups=tuple(groups))

    made = small_run.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLFLOW_HOME", str(home))
        patch.setenv("COLUMNS", "160")
        patch.setattr(small_run, "batch", batch)
        environment = {**drawn().model_dump(exclude={"id", "act", "observe"}), "page_frames": 50}
        context = prepare_small(
            home,
            versions=1,
            prompts=[SEEDS],
            environment=environment,
            engine={"max_new_tokens": 24},
            reward={"kind": "exact"},
        )
        train_small(context)
        yield context


# --- replay -------------------------------------------------------------------------------------------------


def test_text_frames_show_each_state_of_an_episode(run: RunContext) -> None:
    taker = replay(run, drawn(text=True), "1", "0", "1", "1", "1")
    assert taker.reason == ""
    shown = ["[@]\n", ".[@]\n", "[@]\n", ".[@]\n", "..[@]\n", "...[@]\n"]
    assert taker.frames == [Frame(turn, text) for turn, text in enumerate(shown)]


def test_picture_frames_have_the_pixels_of_each_state(run: RunContext) -> None:
    taker = replay(run, drawn(), "1")
    assert (taker.reason, [frame.turn for frame in taker.frames]) == ("", [0, 1, 2, 3])
    for frame in taker.frames:
        picture = np.asarray(Image.open(io.BytesIO(write_png(frame))))
        assert picture.shape == (4, 8, 3)
        red = {int(column) for column in np.flatnonzero((picture[0] == (255, 0, 0)).all(axis=1))}
        assert red == {2 * frame.turn, 2 * frame.turn + 1}


def test_frozen_lake_has_its_board_after_each_turn(run: RunContext) -> None:
    lake = GymnasiumEnvironment(id="FrozenLake-v1", options={"is_slippery": False}, actions=LAKE)
    taker = replay(run, lake, *WAY)
    assert (taker.reason, len(taker.frames)) == ("", 7)
    assert taker.frames[-1].text == "  (Right)\nSFFF\nFHFH\nFFFH\nHFF[G]\n"


def test_slippery_frozen_lake_is_replayed_by_its_seed(run: RunContext) -> None:
    lake = GymnasiumEnvironment(id="FrozenLake-v1", options={"is_slippery": True}, actions=LAKE)
    assert replay(run, lake, *WAY).reason == ""


def test_frozen_lake_without_pygame_says_so_or_has_pictures(run: RunContext) -> None:
    lake = GymnasiumEnvironment(
        id="FrozenLake-v1", options={"is_slippery": False, "render_mode": "rgb_array"}, actions=LAKE
    )
    taker = replay(run, lake, *WAY)
    try:
        import pygame  # noqa: F401
    except ImportError:
        assert taker.reason.startswith("render failed with DependencyNotInstalled: pygame is not installed")
    else:
        assert [(frame.width, frame.height) for frame in taker.frames] == [(256, 256)] * 7


def test_trl_class_with_render_mode_has_frames(run: RunContext) -> None:
    taker = replay(run, trl("Lamp", module="rendered_worlds"), call("switch"), call("switch") * 3, "done")
    texts = ["the lamp is off", "the lamp is on", "the lamp is off"]
    assert (taker.reason, taker.frames) == ("", [Frame(turn, text) for turn, text in enumerate(texts)])


def test_slow_render_does_not_use_the_time_limit_of_a_turn(run: RunContext) -> None:
    lamp = trl("SlowLamp", module="rendered_worlds", turn_seconds=0.6)
    taker = replay(run, lamp, call("switch") * 3, "done")
    assert (taker.reason, [frame.turn for frame in taker.frames]) == ("", [0, 1])


def test_text_that_utf8_cannot_encode_is_escaped(run: RunContext) -> None:
    """The page of a run and files are written as UTF-8."""
    taker = replay(run, drawn(wrong="lone surrogate"), "1")
    assert [frame.text for frame in taker.frames] == ["\\udc80"] * 2
    assert taker.reason == "render failed with RuntimeError: no \\udc80"


def test_mixed_environment_has_frames_of_its_member(run: RunContext) -> None:
    mixed = MixedEnvironment(kinds={"lamp": trl("Lamp", module="rendered_worlds"), "walk": drawn()}, default="walk")
    assert len(replay(run, mixed, "1").frames) == 4


@pytest.mark.parametrize(
    ("environment", "turns", "reason"),
    [
        (drawn(wrong="random start"), [], f"{CHANGED} (turn 1 begins with another text)"),
        (drawn(wrong="random step"), [0, 1], f"{CHANGED} (turn 3 begins with another text)"),
        (drawn(wrong="random end"), [0, 1, 2], f"{CHANGED} (its reward is "),
        (drawn(wrong="render error"), [0, 1], "render failed with RuntimeError: no screen"),
        (drawn(wrong="render hang"), [0, 1], "render took more than 1 s"),
        (drawn(wrong="render floats"), [], "render failed with render returned a Pixels of shape (1, 1, 3) and type "),
        (drawn("Fixed"), [], NO_REPLAY),
        (GymnasiumEnvironment(path="odd_worlds:Walk", folder=str(GUESTS)), [], RENDERS_NOTHING),
        (trl("Judged"), [], RENDERS_NOTHING),
        (trl("Printer", module="rendered_worlds"), [], RENDERS_NOTHING),
    ],
)
def test_missing_frames_have_a_one_sentence_reason(
    run: RunContext, environment: EnvironmentConfig, turns: list[int], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "took more" in reason:
        monkeypatch.setattr(foreign_frames, "RENDER_SECONDS", 1.0)
    taker = replay(run, environment, "1")
    assert reason in taker.reason
    assert "\n" not in taker.reason
    assert [frame.turn for frame in taker.frames] == turns


def test_changed_response_or_turn_number_ends_the_frames(run: RunContext) -> None:
    walk = with_environment(run, drawn())
    [one] = record(walk, ["1"])
    shorter = with_environment(run, drawn(goal=2))
    taker = replay_frames(shorter, KEY, [one], FrameTaker(), 60)
    assert taker.reason.startswith(f"{CHANGED} (it ended after turn 2 of 3")
    longer = with_environment(run, drawn(goal=5))
    taker = replay_frames(longer, KEY, [one], FrameTaker(), 60)
    assert (taker.reason, taker.frames[-1].turn) == (f"{CHANGED} (it goes on after turn 3)", 2)


def test_replay_ends_at_its_time_limit(run: RunContext) -> None:
    taker = replay(run, drawn(wrong="render hang"), "1", seconds=2)
    assert taker.reason == "the replay took more than 2 s"


def test_environment_without_worker_processes_is_refused(run: RunContext) -> None:
    from rollflow.tasks.environments.config import SingleTurnEnvironment

    with pytest.raises(ConfigError, match='only environments of kind = "trl" and "gymnasium" have frames'):
        replay(run, SingleTurnEnvironment(), "1")


def test_episode_in_training_requests_no_frame(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests to the environment are the same as to an environment that cannot render."""
    asked = list[dict[str, Any]]()

    def pack(fields: dict[str, Any]) -> bytes:
        asked.append(fields)
        return pack_line(fields)

    monkeypatch.setattr(foreign_world, "pack_line", pack)
    record(with_environment(run, drawn()), ["1"])
    assert [one["do"] for one in asked] == ["open", "reset", "step", "step", "step", "close"]
    assert {*asked[0]} == {"do", "seed"}


def test_render_of_a_trl_class_without_render_mode_is_a_tool(run: RunContext) -> None:
    [lamp], [printer] = (
        record(with_environment(run, trl(name, module="rendered_worlds")), ["done"]) for name in ("Lamp", "Printer")
    )
    first = [run.tokenizer.decode(one.tokens) for one in (lamp, printer)]
    assert ["render" in text for text in first] == [False, True]


# --- frames -------------------------------------------------------------------------------------------------


@given(high=st.integers(1, 60), wide=st.integers(1, 60), colours=st.sampled_from([3, 4]), most=st.integers(1, 400))
def test_packed_picture_stays_within_the_pixel_limit(high: int, wide: int, colours: int, most: int) -> None:
    array = np.random.default_rng(high * wide).integers(0, 256, (high, wide, colours), np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guest_frames, "MOST_PIXELS", most)
        frame = read_frame(3, pack_frame(array))
    assert frame is not None
    assert frame.width * frame.height <= most
    assert frame.pixels[:3] == array[0, 0, :3].tobytes()
    if high * wide <= most:
        assert frame.pixels == array[:, :, :3].tobytes()
    picture = Image.open(io.BytesIO(write_png(frame)))
    assert picture.tobytes() == frame.pixels


def test_largest_picture_fits_into_a_message() -> None:
    assert len(pack_line(pack_frame(np.zeros((1024, 1024, 3), np.uint8)))) < LONGEST_LINE


@pytest.mark.parametrize(
    ("found", "answer"),
    [
        (None, {}),
        (["a\n", "b\n"], {"text": "a\nb\n"}),
        ("\x1b[41mS\x1b[0mF", {"text": "[S]F"}),
        (5, {"error": f"render returned a int, and {EXPECTED}"}),
        (
            np.zeros((2, 2), np.uint8),
            {"error": f"render returned a ndarray of shape (2, 2) and type uint8, and {EXPECTED}"},
        ),
        (
            np.zeros((2, 0, 3), np.uint8),
            {"error": f"render returned a ndarray of shape (2, 0, 3) and type uint8, and {EXPECTED}"},
        ),
    ],
)
def test_rendered_object_is_a_frame_or_an_error(found: Any, answer: dict[str, str]) -> None:
    assert pack_frame(found) == answer


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"text": 5},
        {"width": 1, "height": 1, "data": "????"},
        {"width": 2, "height": 1, "data": "AAAA"},
        {"width": -1, "height": -1, "data": "AAAA"},
        {"width": 0, "height": 0, "data": ""},
        {"width": 1025, "height": 1024, "data": base64.b64encode(bytes(3 * 1024 * 1025)).decode()},
    ],
)
def test_invalid_answer_of_a_process_is_not_a_frame(answer: dict[str, Any]) -> None:
    assert read_frame(0, answer) is None


@given(
    authors=st.lists(st.sampled_from(["policy", "environment"]), max_size=12),
    turns=st.sets(st.integers(0, 15)),
    said=st.text(st.sampled_from("ab"), max_size=2),
)
def test_each_frame_stands_between_its_turn_and_the_next(authors: list[Any], turns: set[int], said: str) -> None:
    parts = [TurnPart("prompt", 0, [0]), *(TurnPart(author, 1 + at, [at]) for at, author in enumerate(authors))]
    frames = [Frame(turn, "ab") for turn in sorted(turns)]
    shown = list(place_frames(parts, frames, lambda _: said))
    assert [one for one in shown if isinstance(one, TurnPart)] == parts
    seen = 0
    for one in shown:
        if isinstance(one, TurnPart):
            seen += one.author == "policy"
        else:
            assert one.turn == seen or (one.turn > seen and seen == authors.count("policy"))
    if said != "ab":
        assert [one for one in shown if isinstance(one, Frame)] == frames


# --- inspect ------------------------------------------------------------------------------------------------


def test_inspect_shows_the_pictures_of_an_episode(
    run: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "small", "0.0.1", "--frames"]) == 0
    out = capsys.readouterr().out
    folder = Path("small-0.0.1-frames")
    heads = re.findall(r"^(prompt|policy|environment|frame) · ", out, re.M)
    assert heads == ["prompt", "frame", *["policy", "environment", "frame"] * 2, "policy", "frame"]
    assert f"frame · after turn 3 · {folder}/turn-003.png" in out
    assert sorted(path.name for path in folder.iterdir()) == [f"turn-00{turn}.png" for turn in range(4)]
    assert {Image.open(path).size for path in folder.iterdir()} == {(8, 4)}


def test_folder_that_cannot_be_written_is_named(
    run: RunContext, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small-0.0.1-frames").write_text("a file")
    assert "small-0.0.1-frames" in refused(capsys, "inspect", "small", "0.0.1", "--frames")


def test_inspect_without_frames_replays_nothing(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollflow.flows.commands.inspect.replay_named", None)
    assert main(["inspect", "small", "0.0.1"]) == 0


def test_inspect_prints_frames_as_json(run: RunContext, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "small", "0.0.1", "--json", "--frames"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [frame["turn"] for frame in found["frames"]] == [0, 1, 2, 3]
    assert Image.open(io.BytesIO(base64.b64decode(found["frames"][1]["png"]))).size == (8, 4)
    assert found["frames_end"] == ""
    assert len(found["trajectories"]) == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (["small", "0.0"], "name it as PROMPT.ATTEMPT.SAMPLE"),
        (["small", "1"], "name it as PROMPT.ATTEMPT.SAMPLE"),
        (["small"], "name it as PROMPT.ATTEMPT.SAMPLE"),
        (["small", "0.0.77"], "has no sample 77"),
        (["small", "90.0.0"], "prompt 90 was not yet issued"),
        (["small", "2.0.0"], "is in no batch of the run, so its frames cannot be shown"),
    ],
)
def test_inspect_refuses_frames_of_anything_but_an_episode(
    run: RunContext, what: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(capsys, "inspect", *what, "--frames")


# --- play ---------------------------------------------------------------------------------------------------

PLAYED = """
name = "played"
groups = 2
group_size = 2
[policy]
path = "{policy}"
[[prompts]]
kind = "seeds"
row = {{ answer = "1" }}
[reward]
kind = "exact"
[environment]
kind = "gymnasium"
max_turns = 1
{environment}
[engine]
kind = "transformers"
max_new_tokens = 60
[evaluation]
prompts = 2
"""


@pytest.mark.parametrize(
    ("environment", "shown"),
    [
        (f'path = "rendered_worlds:Drawn"\nfolder = "{GUESTS}"\noptions = {{ text = true }}', ["[@]", "[@]"]),
        (f'path = "rendered_worlds:Drawn"\nfolder = "{GUESTS}"', []),
        (f'path = "odd_worlds:Walk"\nfolder = "{GUESTS}"', []),
        ('id = "FrozenLake-v1"\nactions = { left = 0, right = 2 }', ["[S]FFF"]),
    ],
    ids=["drawn text", "drawn picture", "no frames", "FrozenLake"],
)
def test_play_shows_text_frames_that_the_policy_has_not_read(
    run: RunContext, environment: str, shown: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "played.toml").write_text(PLAYED.format(policy=run.config.policy.path, environment=environment))
    assert main(["play", str(tmp_path / "played.toml"), "--random"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^frame\n  (\S+)", out, re.M) == shown
    assert "1 episode" in out


# --- page ---------------------------------------------------------------------------------------------------


def test_page_of_a_run_shows_the_pictures_of_its_episodes(run: RunContext) -> None:
    text = write_newest_episodes(run)
    found = re.findall(r"^!\[frame ([^\]]*)\]\(data:image/png;base64,([^)]*)\)$", text, re.M)
    assert [name for name, _ in found] == ["at the start", "after turn 1", "after turn 2", "after turn 3"]
    for turn, (_, data) in enumerate(found):
        picture = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))
        assert {int(at) for at in np.flatnonzero((picture[0] == (255, 0, 0)).all(axis=1))} == {2 * turn, 2 * turn + 1}
    assert "no further frames" not in text


def test_page_shows_no_frame_without_key_page_frames(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    with_frames = write_newest_episodes(run)
    monkeypatch.setattr(page_frames, "place_page_frames", None)
    monkeypatch.setattr(type(run.config.environment), "shown_frames", 0)
    text = write_newest_episodes(run)
    assert "frame" not in text
    assert text == re.sub(r"\*\*frame\*\*[^\n]*\n\n!\[[^\n]*(\n\n|$)", "", with_frames).rstrip()


def test_page_shows_the_turns_if_the_replay_fails(run: RunContext, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> FrameTaker:
        raise ConfigError("the prompts have changed")

    monkeypatch.setattr(page_frames, "replay_frames", fail)
    text = write_newest_episodes(run)
    assert "**policy**" in text
    assert "no further frames: the prompts have changed" in text


@pytest.mark.parametrize(("name", "frames"), [("walk", 0), ("shown", 2)])
def test_each_environment_of_a_mix_has_its_own_frame_limit(run: RunContext, name: str, frames: int) -> None:
    """An environment without `page_frames` is never replayed for the page, because its actions may have effects."""
    kinds: Any = {"walk": drawn(), "shown": drawn().model_copy(update={"page_frames": 2})}
    mixed: Any = with_environment(run, MixedEnvironment(kinds=kinds, default=name))
    mixed.config = mixed.config_at(0)
    found = record(mixed, ["1"])
    parts = split_turns(found[0])
    placed = [one for one in page_frames.place_page_frames(mixed, KEY, found)(parts) if isinstance(one, str)]
    assert len([one for one in placed if one.startswith("![")]) == frames
    assert bool(placed) == bool(frames)


def test_page_shows_no_frame_of_a_turn_that_it_leaves_out(run: RunContext) -> None:
    shown: Any = run
    parts = [TurnPart("prompt", 0, [0]), TurnPart("policy", 1, [1])]
    place = page_frames.place_page_frames(shown, KEY, record(run, ["1"]))
    placed = "".join(one for one in place(parts) if isinstance(one, str))
    assert re.findall(r"[*]{2}frame[*]{2} · (.*?)!", placed) == ["at the start", "after turn 1"]


def test_picture_on_the_page_is_small() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1000, 1000, 3), np.uint8)
    data = write_png(Frame(0, "", 1000, 1000, noise.tobytes()), page_frames.LONGEST_SIDE, COLOURS)
    assert Image.open(io.BytesIO(data)).size == (320, 320)
    assert len(data) < 100_000
