"""Correct and faulty environments for tests, written as a user of TRL or gymnasium would: without rollflow, for Python
3.9 or newer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time

RAW = {  # lines that a broken environment may write in place of an answer
    "deep": b"[" * 100_000,
    "huge": b'{"value": 1' + b"0" * 400 + b"}",
    "utf8": b'{"text": "\xff"}',
    "tools": b'{"tools": 5}',
    "names": b'{"tools": [{"function": {"name": 5}}]}',
}


class Quiet:
    """An environment without a first observation; subclasses add tools."""

    def reset(self, **row) -> str | None:
        self.pid = os.getpid()
        return None


class Counter:
    """Counts to a number; the methods are synchronous and asynchronous tools."""

    def __init__(self, start: int = 0) -> None:
        self.count = self.start = start

    def reset(self, prompt: list, answer: str = "") -> str:
        self.goal = int(answer or 3)
        return f" Begin at {self.count}."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: the number to add
        """
        if number < 0:
            raise ValueError("the number is negative")
        self.count += number
        return str(self.count)

    async def double(self) -> int:
        """Double the count."""
        await asyncio.sleep(0)
        self.count *= 2
        return self.count

    async def get_reward(self) -> float:
        await asyncio.sleep(0)
        return float(self.count == self.goal)


class Judged(Quiet):
    """An environment whose episodes the run's scorer scores."""

    def look(self) -> str:
        """Look around."""
        return "a room"


class Bad:
    """An environment that fails. `wrong` names the fault, and `where` the step: init, reset, act or reward."""

    def __init__(self, wrong: str, where: str = "act") -> None:
        self.wrong, self.where = wrong, where
        self._fail("init")

    def reset(self, **row) -> None:
        self._fail("reset")

    def act(self) -> str:
        """Act."""
        self._fail("act")
        return "done"

    def get_reward(self) -> float:
        self._fail("reward")
        return 0.5 if self.where != "reward" or self.wrong != "nan" else float("nan")

    def _fail(self, where: str) -> None:
        if where != self.where:
            return
        if self.wrong == "hang":
            while True:
                time.sleep(3600)
        if self.wrong == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
            while True:
                pass
        if self.wrong == "error":
            raise RuntimeError("broken world")
        if self.wrong == "exit":
            sys.exit(3)
        if self.wrong == "quit":
            os._exit(4)
        if self.wrong == "abort":
            os.abort()
        if self.wrong == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.wrong == "garbage":
            self._write(b"\xff{garbage}\n" * 3)
        if self.wrong in RAW:
            self._write(RAW[self.wrong] + b"\n")
        if self.wrong == "orphan":
            orphan = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(3600)"
            subprocess.run([sys.executable, "-c", orphan], check=True)

    def _write(self, data: bytes) -> None:
        for fd in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(fd, data)


class Image(Quiet):
    def look(self) -> list[dict]:
        """Look around."""
        return [{"type": "image", "image": "x"}]


class Untyped(Quiet):
    def look(self, where) -> str:
        """Look.

        Args:
            where: the place
        """
        return where


class Choosy(Quiet):
    def look(self, where: str) -> str:
        """Look.

        Args:
            where: the place (choices: up, down)
        """
        return where


class Undescribed(Quiet):
    def look(self) -> str:
        return ""


class Discrete:
    """The action space of `Walk`, which looks like gymnasium's."""

    n, start = 2, 0


class Walk:
    """A class with gymnasium's methods, without gymnasium: walk right to position 3. The reward of a step is its
    number.
    """

    action_space = Discrete()

    def __init__(self, goal: int = 3, wrong: str = "") -> None:
        self.goal, self.wrong = goal, wrong

    def reset(self, *, seed=None, options=None):
        self.place, self.steps = 0, 0
        return self.place, {"seed": seed, "drawn": random.random()}

    def step(self, action):
        self.steps += 1
        if self.wrong == "error" and self.steps == 2:
            raise RuntimeError("broken world")
        if self.wrong == "hang" and self.steps == 2:
            time.sleep(3600)
        if self.wrong == "infinite":
            return self.place, float("inf"), False, False, {}
        self.place += 1 if action == 1 else -1
        return self.place, float(self.steps), self.place >= self.goal, False, {}

    def close(self) -> None:
        if self.wrong == "hang at close":
            time.sleep(3600)


def observe_drawn(found, info) -> str:
    """Return the seed and a random number that the environment has drawn."""
    return "{}/{}".format(info.get("seed"), info.get("drawn"))


def observe_process(found, info) -> str:
    """Return the id of the process of the environment."""
    return str(os.getpid())


def act_by_arrow(text: str) -> int:
    """Return the action of an arrow."""
    if text not in ("<", ">"):
        raise ValueError("draw an arrow")
    return int(text == ">")


class Slow(Quiet):
    """An environment whose creation, tool and reward take the seconds that its options say."""

    def __init__(self, setup: float = 0.0, rest: float = 0.0) -> None:
        self.seconds = rest
        time.sleep(setup)

    def rest(self) -> str:
        """Rest."""
        time.sleep(self.seconds)
        return "rested"

    def get_reward(self) -> float:
        return 1.0


class Saving(Walk):
    """A walk whose state can be stored. `wrong` names a fault of its snapshots."""

    def snapshot(self) -> bytes:
        if self.wrong == "no bytes":
            return "text"
        return b"\xff\n" + bytes([self.place, self.steps])

    def restore(self, data: bytes) -> None:
        if self.wrong == "no restore":
            raise RuntimeError("another world")
        if self.wrong == "quit at restore":
            os._exit(4)
        self.place, self.steps = data[2:]


class Placed(Walk):
    """A walk that writes into a file, at each reset, the process id of the Ray actor in which its processes run. After
    ten resets it kills a Ray actor of the class `victim`, once."""

    def __init__(self, file: str, victim: str = "", goal: int = 3) -> None:
        super().__init__(goal)
        self.file, self.victim = file, victim

    def reset(self, **keys):
        above, parent = [], os.getpid()
        while parent > 1:
            with open(f"/proc/{parent}/stat") as stat:
                parent = int(stat.read().rpartition(")")[2].split()[1])
            above.append(parent)
        with open(self.file, "a+") as file:
            file.write("".join(f"{pid}\n" for pid in above if read_command(pid).startswith("ray::EnvironmentActor")))
            file.seek(0)
            resets = len(file.readlines())
        if self.victim and resets > 10:
            with contextlib.suppress(FileExistsError), open(self.file + ".killed", "x") as killed:
                [pid] = [pid for pid in list_family() if read_command(pid).startswith(f"ray::{self.victim}")][:1]
                killed.write(str(pid))
                os.kill(pid, signal.SIGKILL)
        return super().reset(**keys)


def act_by_length(text: str) -> int:
    """Return 1 if the text has an even length, else 0."""
    return 1 - len(text) % 2


def read_command(pid: int) -> str:
    """Return the command line of a process; "" if the process has ended."""
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def list_family() -> list[int]:
    """List the processes with the `ROLLFLOW_HOME` of this process."""
    found, home = [], "ROLLFLOW_HOME={}".format(os.environ["ROLLFLOW_HOME"]).encode()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
            if home in file.read().split(b"\0"):
                found.append(int(name))
    return found


class Wrapped:
    """A wrapper that ends an episode after two steps, as gymnasium's TimeLimit does."""

    def __init__(self, **options) -> None:
        self.env = self.unwrapped = Saving(**options)
        self.action_space, self._elapsed_steps = self.env.action_space, None

    def reset(self, **keys):
        self._elapsed_steps = 0
        return self.env.reset(**keys)

    def step(self, action):
        self._elapsed_steps += 1
        found, reward, ended, _, info = self.env.step(action)
        return found, reward, ended, self._elapsed_steps >= 2, info

    def close(self) -> None:
        pass


class Paying(Counter):
    """Counts as `Counter`, and writes each action into a file, at most once for each key."""

    can_replay = False

    def __init__(self, file: str, saves: bool = True) -> None:
        super().__init__()
        self.file, self.key = file, ""

    def begin_action(self, action_key: str) -> str | None:
        self.key = action_key
        with open(self.file, "a+") as file:
            file.seek(0)
            done = dict(line.rstrip("\n").split(" ", 1) for line in file)
        return done.get(action_key)

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: the number to add
        """
        found = super().add(number)
        with open(self.file, "a") as file:
            file.write(f"{self.key} {found}\n")
        return found


class Keeping(Paying):
    """Writes its actions into a file, as `Paying` does, and has an asynchronous method `snapshot`."""

    async def snapshot(self) -> bytes:
        await asyncio.sleep(0)
        return bytes([self.count])

    def restore(self, data: bytes) -> None:
        (self.count,) = data


class Tooled(Quiet):
    """Has tools with the names of optional methods. They stay tools, because `snapshot` does not return bytes."""

    def snapshot(self) -> str:
        """Take a photo."""
        return "a photo"

    def restore(self, place: str) -> str:
        """Restore a place.

        Args:
            place: the place
        """
        return place
