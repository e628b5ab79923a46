"""Renders the environment of an episode after its reset and after each action, for people who look at the episode.

Frames are taken only of an episode that a person plays, or of a stored episode that is replayed. The environment's
worker process does the rendering. A run renders no episodes while it plays them.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rollflow.storage.records import Outcome, Prompt
from rollflow.tasks.environments.base import Environment, find_player
from rollflow.tasks.environments.foreign.faults import CallFailed, WorldEnded
from rollflow.tasks.environments.foreign.guest_world import GuestWorld
from rollflow.tasks.environments.foreign.play import ForeignEpisodes
from rollflow.tasks.environments.foreign.pool import WorldPool
from rollflow.tasks.environments.guest.frames import MOST_PIXELS
from rollflow.tasks.environments.guest.wire import LONGEST_TEXT
from rollflow.tasks.environments.limits import ComputedTime
from rollflow.tasks.environments.mixed import MixedMember
from rollflow.tasks.environments.ports import NO_PORTS
from rollflow.tasks.scorers.base import make_storable

MOST_FRAMES = 100  # largest number of frames of an episode
RENDER_SECONDS = 10.0  # longest time in seconds in which an environment may render a frame
RENDERS_NOTHING = "the environment renders nothing; it needs a method render, and a render_mode (ansi or rgb_array)"
NO_REPLAY = "the environment cannot repeat its actions (can_replay = False)"


@dataclass(frozen=True, slots=True)
class Frame:
    """What an environment rendered after turn number `turn` (0: after the reset): a text, or a picture.

    `pixels` has three bytes for each pixel (red, green, blue), row by row.
    """

    turn: int
    text: str = ""
    width: int = 0
    height: int = 0
    pixels: bytes = b""


@dataclass(slots=True)
class FrameTaker:
    """The frames of the newest episode of an environment. `reason` says why there are no further frames."""

    most: int = MOST_FRAMES
    is_replay: bool = True  # False if the episode is played for the first time; then only frames of text are kept
    frames: list[Frame] = field(default_factory=list)
    reason: str = ""

    def attach(self, environment: Environment, prompt: Prompt) -> bool:
        """Take frames of the next episode of a prompt; return False if its environment is of a kind without frames."""
        self.frames, self.reason = [], ""
        player, _ = find_player(environment, prompt, NO_PORTS)
        own = player.own if isinstance(player, MixedMember) else player
        if isinstance(own, ForeignEpisodes):
            own.make_pool = partial(WorldPool, build_world=partial(RenderedWorld, self))
        return isinstance(own, ForeignEpisodes)

    def take_new(self) -> list[Frame]:
        """Return the frames that were taken since the last call."""
        found, self.frames = self.frames, []
        return found

    def add(self, turn: int, answer: Mapping[str, Any]) -> None:
        """Keep the frame in an answer to `render`. If a turn has several actions, the frame after the last one is
        kept.
        """
        if (frame := read_frame(turn, answer)) is None:
            self.reason = RENDERS_NOTHING if not answer else "the environment's process wrote no valid frame"
        elif frame.pixels and not self.is_replay:
            self.reason = "pictures are not shown while a person plays"
        else:
            self.frames = [one for one in self.frames if one.turn < turn] + [frame]


class RenderedWorld(GuestWorld):
    """An environment that is rendered after its reset and after each action."""

    def __init__(self, taker: FrameTaker, *given: Any) -> None:
        super().__init__(*given)
        self._taker, self._turn = taker, 0
        self.opening = {"frames": True} if taker.is_replay else {}

    async def open(self, seed: int, seconds: float | None = None) -> Mapping[str, Any]:
        """Create the environment, as `World.open` specifies."""
        described = await super().open(seed, seconds)
        if self._taker.is_replay and described.get("can_replay") is False:
            raise self._end(Outcome.UNJUDGED, NO_REPLAY)
        return described

    async def reset(self, row: Mapping[str, Any], seed: int) -> str | None:
        """Begin the episode, as `World.reset` specifies, and render its first state."""
        text = await super().reset(row, seed)
        await self._take_frame()
        return text

    def begin_turn(self) -> None:
        """Count the turns of the policy."""
        super().begin_turn()
        self._turn += 1

    async def call(self, name: str, arguments: Any, key: str = "", seconds: float | None = None) -> str:
        """Call a tool, as `World.call` specifies, and render the state after the call."""
        text = await super().call(name, arguments, key, seconds)
        await self._take_frame()
        return text

    async def step(self, text: str, key: str = "") -> Mapping[str, Any]:
        """Perform an action, as `World.step` specifies, and render the state after the action."""
        answer = await super().step(text, key)
        await self._take_frame()
        return answer

    async def _take_frame(self) -> None:
        """Render the state. If the environment's `render` raises an error, no more frames are taken, but the episode
        continues.

        Raises:
            WorldEnded: the process had to be killed, or has ended.
        """
        taker = self._taker
        if not taker.reason and len(taker.frames) >= taker.most:
            taker.reason = f"only {taker.most} frames of an episode are shown"
        if taker.reason:
            return
        # The run did not render the episode, so the time of `render` does not count toward its time limits.
        used, self._used = self._used, ComputedTime()
        try:
            taker.add(self._turn, await self._ask({"do": "render"}, RENDER_SECONDS))
        except CallFailed as failed:
            taker.reason = make_storable(f"render failed with {failed}", LONGEST_TEXT)
        except WorldEnded as ended:
            taker.reason = make_storable(str(ended), LONGEST_TEXT)
            raise
        finally:
            self._used = used


def read_frame(turn: int, answer: Mapping[str, Any]) -> Frame | None:
    """Return the frame in an answer of a worker process; None if there is no frame, or no valid one."""
    match answer:
        case {"text": str(text)}:
            return Frame(turn, make_storable(text, LONGEST_TEXT))
        case {"width": int(width), "height": int(height), "data": str(data)}:
            with contextlib.suppress(ValueError):
                pixels = base64.b64decode(data, validate=True)
                if min(width, height) > 0 and len(pixels) == 3 * width * height <= 3 * MOST_PIXELS:
                    return Frame(turn, "", width, height, pixels)
    return None
