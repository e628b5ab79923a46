"""Places the frames of an episode (what its environment renders) between its turns, and converts pixels to PNG
pictures.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from rollflow.flows.views.turns import TurnPart
from rollflow.tasks.environments.foreign.frames import Frame


def place_frames(
    parts: Sequence[TurnPart], frames: Sequence[Frame], decode: Callable[[Sequence[int]], str]
) -> Iterator[TurnPart | Frame]:
    """Yield the parts of an episode, each turn followed by its frame. If the part before a frame already contains the
    frame's text, the text is not repeated.
    """
    left, turns, said = deque(frames), 0, ""

    def take(last: float) -> Iterator[Frame]:
        while left and left[0].turn <= last:
            frame = left.popleft()
            if frame.pixels or frame.text.strip() not in said:
                yield frame

    for part in parts:
        if part.author == "policy":
            yield from take(turns)
            turns, said = turns + 1, ""
        else:
            said = decode(part.readable)
        yield part
    yield from take(float("inf"))


def name_turn(frame: Frame) -> str:
    """Return text that says after which turn a frame was rendered."""
    return f"after turn {frame.turn}" if frame.turn else "at the start"


def write_png(frame: Frame, longest: int | None = None, colours: int | None = None) -> bytes:
    """Return the pixels of a frame as a PNG file, scaled down if a side is longer than `longest` pixels."""
    from PIL import Image

    picture = Image.frombytes("RGB", (frame.width, frame.height), frame.pixels)
    if longest is not None:
        picture.thumbnail((longest, longest))
    if colours is not None:
        picture = picture.quantize(colours)
    picture.save(written := io.BytesIO(), format="PNG", optimize=True)
    return written.getvalue()
