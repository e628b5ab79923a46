"""Replays the episode that a user names, and shows its frames (what its environment renders) in the terminal, as PNG
files or as JSON.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from rollflow.flows.views.frames.pictures import name_turn, place_frames, write_png
from rollflow.flows.views.frames.replaying import REPLAY_SECONDS, replay_frames
from rollflow.flows.views.inspect_values import batch_of, check_key, trajectories_of
from rollflow.flows.views.turns import TurnPart, escape_controls, list_branches, render_head, render_part
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.lineage import AwaitingTraining, Consumed, list_fates
from rollflow.storage.records import GroupKey
from rollflow.tasks.environments.foreign.frames import Frame, FrameTaker
from rollflow.tasks.run.context import RunContext


def replay_named(context: RunContext, what: str | None) -> FrameTaker:
    """Replay the episode `PROMPT.ATTEMPT.SAMPLE` of a run, and return its frames.

    Raises:
        ConfigError: the run stores no such episode, or its environment is of a kind without frames.
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", what or ""):
        raise ConfigError("--frames shows the frames of one episode; name it as PROMPT.ATTEMPT.SAMPLE, e.g. 12.0.3")
    prompt, attempt, sample = map(int, str(what).split("."))
    key, attempts = GroupKey(prompt, attempt), list_fates(context.log, prompt)
    check_key(key, attempts, context.log.state.cursor)
    if not isinstance(fate := attempts[key], Consumed | AwaitingTraining):
        raise ConfigError(
            f"attempt {prompt}.{attempt} is in no batch of the run, so its frames cannot be shown; leave out --frames"
        )
    batch = batch_of(context, fate)
    [first] = trajectories_of(context, key, batch, sample)
    if first.branch is not None:
        parent = f"{prompt}.{attempt}.{first.branch.parent}"
        raise ConfigError(
            f"sample {sample} is a branch of an episode, but --frames shows only whole episodes; name {parent}"
        )
    every = trajectories_of(context, key, batch, None)
    return replay_frames(context, key, list_branches(every, first), FrameTaker(), REPLAY_SECONDS)


def list_values(taker: FrameTaker) -> dict[str, Any]:
    """Return frames as JSON values; a picture is a PNG file in Base64."""
    return {"frames": [_value(frame) for frame in taker.frames], "frames_end": taker.reason}


def _value(frame: Frame) -> dict[str, Any]:
    if not frame.pixels:
        return {"turn": frame.turn, "text": frame.text}
    png = base64.b64encode(write_png(frame)).decode()
    return {"turn": frame.turn, "width": frame.width, "height": frame.height, "png": png}


def show_turns(context: RunContext, parts: Sequence[TurnPart], taker: FrameTaker | None, folder: Path) -> Group:
    """Return a multi-turn trajectory part by part: who wrote the part, notes on its tokens, and its text. Frames stand
    between the parts; pictures are written as PNG files to `folder`.

    Raises:
        ConfigError: a picture cannot be written.
    """

    def decode(tokens: Sequence[int]) -> str:
        return context.tokenizer.decode_response(tokens, special=False)

    shown: list[Group | Text] = []
    for one in place_frames(parts, taker.frames if taker else (), decode):
        if isinstance(one, TurnPart):
            shown.append(render_part(one.author, decode(one.readable), one.notes))
        elif one.pixels:
            shown.append(render_head("frame", [name_turn(one), str(_save_picture(one, folder))]))
        else:
            shown.append(render_part("frame", one.text, [name_turn(one)]))
    if taker and taker.reason:
        shown.append(Text(escape_controls(f"no further frames: {taker.reason}")))
    return Group(Text("turns", style="italic"), *shown)


def _save_picture(frame: Frame, folder: Path) -> Path:
    path = folder / f"turn-{frame.turn:03d}.png"
    try:
        folder.mkdir(exist_ok=True)
        path.write_bytes(write_png(frame))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); use another current folder, or --json"
        ) from None
    return path
