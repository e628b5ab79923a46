"""Writes the frames of an episode (what its environment renders after each turn) as Markdown, for a run's page in
Prefect.
"""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

from rollflow.flows.views.frames.pictures import name_turn, place_frames, write_png
from rollflow.flows.views.frames.replaying import replay_frames
from rollflow.flows.views.turns import TurnPart, quote_text
from rollflow.storage.errors import RollflowError
from rollflow.storage.records import GroupKey, Trajectory
from rollflow.tasks.environments.config import MixedEnvironment
from rollflow.tasks.environments.foreign.frames import FrameTaker
from rollflow.tasks.run.context import RunContext

PAGE_SECONDS = 20.0  # longest time in seconds of a replay for the page; the supervising flow waits for it
LONGEST_SIDE = 320  # largest number of pixels of a side of a picture on the page
COLOURS = 64  # number of colours of a picture on the page, which bounds its size


def place_page_frames(
    context: RunContext, key: GroupKey, trajectories: Sequence[Trajectory]
) -> Callable[[Sequence[TurnPart]], Iterable[TurnPart | str]]:
    """Return a function that puts the frames of an episode between its parts, as Markdown. Without `page_frames` in the
    config, that function returns only the parts.
    """
    taker = FrameTaker()
    try:
        taker.most = _find_most(context, key)
        if not taker.most:
            return lambda parts: parts
        replay_frames(context, key, trajectories, taker, PAGE_SECONDS)
    except RollflowError as error:  # the page shows the episode without frames
        taker.reason = str(error)
    return functools.partial(_write_frames, taker, context.tokenizer.decode)


def _find_most(context: RunContext, key: GroupKey) -> int:
    """Return the largest number of frames to show. The config of the prompt's environment sets this number."""
    environment = context.config.environment
    if not isinstance(environment, MixedEnvironment) or not environment.shown_frames:
        return environment.shown_frames
    name = context.prompts().prompt(key.prompt).reference.get(environment.column, environment.default)
    return environment.kinds[name].shown_frames if name in environment.kinds else 0


def _write_frames(
    taker: FrameTaker, decode: Callable[[Sequence[int]], str], parts: Sequence[TurnPart]
) -> Iterator[TurnPart | str]:
    turns = sum(part.author == "policy" for part in parts)  # the page leaves out parts of a long episode
    for one in place_frames(parts, [frame for frame in taker.frames if frame.turn <= turns], decode):
        if isinstance(one, TurnPart):
            yield one
            continue
        yield f"**frame** · {name_turn(one)}"
        if one.pixels:
            data = base64.b64encode(write_png(one, LONGEST_SIDE, COLOURS)).decode()
            yield f"![frame {name_turn(one)}](data:image/png;base64,{data})"
        else:
            yield quote_text(one.text)
    if taker.reason:
        yield quote_text(f"no further frames: {taker.reason}")
