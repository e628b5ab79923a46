"""Environments for tests that render their state, as a user of gymnasium or TRL writes them."""

from __future__ import annotations

import random
import time

from odd_worlds import Walk


class Pixels:
    """An array with some of the attributes of a numpy array, for an interpreter without numpy."""

    def __init__(self, rows, dtype: str = "uint8") -> None:
        self.rows, self.dtype = rows, dtype
        self.shape = (len(rows), len(rows[0]), len(rows[0][0]))

    def __getitem__(self, places):
        high, wide, colours = places
        return Pixels([[pixel[colours] for pixel in row[wide]] for row in self.rows[high]])

    def tobytes(self) -> bytes:
        return bytes(value for row in self.rows for pixel in row for value in pixel)


class Drawn(Walk):
    """A walk that renders its position as text or as a picture. `wrong` names a fault of the walk."""

    def __init__(self, goal: int = 3, wrong: str = "", text: bool = False, wide: int = 8) -> None:
        super().__init__(goal, wrong)
        self.text, self.wide = text, wide

    def reset(self, *, seed=None, options=None):
        found = super().reset(seed=seed, options=options)
        self.drawn = random.SystemRandom().random()
        return (self.drawn if self.wrong == "random start" else found[0]), found[1]

    def step(self, action):
        place, reward, ended, late, info = super().step(action)
        if self.wrong == "random step" and self.place == 2:
            place = self.drawn
        if self.wrong == "random end" and ended:
            reward += self.drawn
        return place, reward, ended, late, info

    def render(self):
        if self.wrong == "render error" and self.place == 2:
            raise RuntimeError("no screen")
        if self.wrong == "render hang" and self.place == 2:
            time.sleep(3600)
        if self.wrong == "render floats":
            return Pixels([[(0.5, 0.5, 0.5)]], "float64")
        if self.wrong == "lone surrogate":
            if self.place == 2:
                raise RuntimeError("no \udc80")
            return "\udc80"
        if self.text:
            return "." * self.place + "\x1b[41m@\x1b[0m\n"
        red, white = (255, 0, 0, 9), (255, 255, 255, 9)
        row = [red if column // 2 == self.place else white for column in range(self.wide)]
        return Pixels([row] * 4)


class Fixed(Drawn):
    """A walk whose actions cannot be done a second time."""

    can_replay = False


class Lamp:
    """A class for TRL with one tool, which shows its state to people."""

    render_mode = "ansi"

    def reset(self, **row) -> None:
        self.on = 0

    def switch(self) -> str:
        """Switch the lamp."""
        self.on ^= 1
        return "click"

    async def render(self) -> str:
        """Show the lamp."""
        return "the lamp is " + ("on" if self.on else "off")

    def get_reward(self) -> float:
        return float(self.on)


class SlowLamp(Lamp):
    """A lamp that renders slowly."""

    def render(self) -> str:
        """Show the lamp."""
        time.sleep(0.7)
        return "slow"


class Printer(Lamp):
    """A class for TRL in which `render` is a tool, because the class has no render mode."""

    render_mode = None
