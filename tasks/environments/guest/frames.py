"""Converts what an environment renders into a frame: a text, or the pixels of a picture."""

from __future__ import annotations

import base64
import re
from typing import Any

from rollflow.tasks.environments.guest.wire import LONGEST_TEXT, Fields

MOST_PIXELS = 1 << 20  # largest number of pixels of a frame; of a larger picture, only some rows and columns are sent
COLOURED = re.compile(r"\x1b\[[0-9;]*m([^\x1b]*)\x1b\[0m")
EXPECTED = "a frame is a text, or an array of type uint8 and shape (height, width, 3)"


def render_frame(own: Any) -> Fields:
    """Return what an environment renders, as the fields of an answer; {} if it renders nothing."""
    if not callable(getattr(own, "render", None)) or getattr(own, "render_mode", "") in (None, "human"):
        return {}
    return pack_frame(own.render())


def pack_frame(found: Any) -> Fields:
    """Return a rendered text or array as the fields of an answer. Of several arrays, only the last one is returned."""
    if isinstance(found, (list, tuple)):
        found = "".join(found) if all(isinstance(one, str) for one in found) else found[-1]
    if found is None:
        return {}
    if isinstance(found, str):
        return {"text": mark_colours(found)[:LONGEST_TEXT]}
    shape = tuple(getattr(found, "shape", ()))
    if len(shape) != 3 or shape[2] not in (3, 4) or 0 in shape or str(found.dtype) != "uint8":
        of = f" of shape {shape} and type {found.dtype}" if shape else ""
        return {"error": f"render returned a {type(found).__name__}{of}, and {EXPECTED}"}
    step = 1
    while -(-shape[0] // step) * -(-shape[1] // step) > MOST_PIXELS:
        step += 1
    pixels = found[::step, ::step, :3]
    height, width = map(int, pixels.shape[:2])
    return {"width": width, "height": height, "data": base64.b64encode(pixels.tobytes()).decode()}


def mark_colours(text: str) -> str:
    """Replace terminal colour codes by brackets around the coloured text, because the policy sees no colours."""
    return COLOURED.sub(r"[\1]", text)
