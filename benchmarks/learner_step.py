"""Compares rollflow's train step with TRL's and with a plain loop: trained tokens per second, and peak memory.

All sides have the same policy, ragged batch and loss (see `learner_sides`). Each side runs in its own process, with its
best setting. The best setting is the setting with the least memory among those within 5% of the side's fastest time.
The sweep over settings comes first and is printed; the sweep uses CPU time, which other work on the machine changes
less. Then the sides take train steps in turns, and a ratio compares two consecutive steps. Memory is the peak above the
memory after loading, by `getrusage`. The losses and gradient norms of all sides and steps must agree, so that no side
does less work.

Tokens are those of the responses. rollflow skips rows with advantage zero, because they have no gradient; TRL does not.
So each workload is measured without such rows, and with them: in the fraction `still` of the groups all rewards are
equal. Without TRL, only the plain loop is compared. Run it as `python -m benchmarks.learner_step`.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import Row, arguments, at_least, at_most, publish

STILL = 0.5
NEAR = 1e-4  # limit of the relative differences of gradient norms, and of the absolute differences of losses
FASTER, LESS_MEMORY = 2.0, 0.5
LIKE_THE_FASTEST = 1.05  # settings within this multiple of the fastest setting's time are treated as equally fast
NO_TRL = "TRL is not measured: install it beside rollflow with `pip install trl==1.16.*`."
SETTINGS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "quick-start": {
        "rollflow": ("256", "512", "1024", "2048", "4096", "16384", "1024c"),
        "trl": ("32", "64", "128", "256", "1024", "128c", "1024c"),
        "trl-compact": ("64", "128", "256", "128c"),
        "plain": ("32", "64", "128", "256", "1024"),
    },
    "wide": {
        "rollflow": ("256", "1024", "4096", "16384", "4096c"),
        "trl": ("1", "4", "8", "16", "1c", "4c"),
        "trl-compact": ("1", "4", "8", "16", "1c", "4c"),
        "plain": ("1", "2", "4", "8"),
    },
    "tiny": {"rollflow": ("512",), "trl": ("8",), "trl-compact": ("8",), "plain": ("8",)},
}


class Side:
    """The process of one side, used as a context manager."""

    module = "benchmarks.learner_sides"

    def __init__(self, name: str, setting: str, folder: Path, count: int) -> None:
        """Start the side with `count` threads."""
        command = [sys.executable, "-m", self.module, name, setting, str(folder), str(count)]
        self._errors = folder / f"{name}-{setting}-{count}.log"
        with self._errors.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.name, self.setting, self.count = name, setting, count
        self._level = self._heard()["peak"]

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def step(self) -> Step:
        """Take the next step."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        found = self._heard()
        return Step(found["seconds"], found["cpu"], found["loss"], found["norm"], found["peak"] - self._level)

    def _heard(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}, {self.setting}: {self._errors.read_text()[-2000:]}")
        return dict(json.loads(line))


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step."""

    seconds: float
    cpu: float  # CPU seconds
    loss: float
    norm: float  # the norm of the gradient
    memory: float  # the peak memory so far, in bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A policy and its batch on disk."""

    workload: str
    folder: Path
    still: float
    tokens: int  # the number of tokens in the batch's responses

    @property
    def name(self) -> str:
        """The name of the case in the rows."""
        return f"{self.workload}, {self.still:.0%} of the groups still" if self.still else self.workload


def written(workload: str, still: float, folder: Path) -> Case:
    """Write a policy and its batch in another process, because a child's peak memory starts with that of its parent."""
    place = folder / f"{workload}-{still:g}"
    command = [sys.executable, "-m", "benchmarks.learner_batches", workload, str(place), str(still)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return Case(workload, place, still, int(done.stdout.splitlines()[-1]))  # a library may print other lines first


def swept(
    case: Case, settings: Mapping[str, Sequence[str]], threads: int, steps: int
) -> tuple[dict[str, str], list[Row]]:
    """Return the best setting of each side, and the results of all settings."""
    best, rows = {}, []
    for name, tried in settings.items():
        found = {setting: _tried(case, name, setting, threads, steps) for setting in tried}
        for setting, (seconds, memory) in found.items():
            rows.append(Row(case.name, f"sweep, {name} {setting}: tokens/s", case.tokens / seconds))
            rows.append(Row(case.name, f"sweep, {name} {setting}: peak, MB", memory / 1e6))
        enough = LIKE_THE_FASTEST * min(seconds for seconds, _ in found.values())
        best[name] = min((s for s in found if found[s][0] <= enough), key=lambda setting: found[setting][1])
    return best, rows


def _tried(case: Case, name: str, setting: str, threads: int, steps: int) -> tuple[float, float]:
    """Return the CPU seconds of the fastest step after the first one, and the memory in bytes."""
    with Side(name, setting, case.folder, threads) as side:
        found = [side.step() for _ in range(steps + 1)][1:]
    seconds = min(step.cpu for step in found)
    print(f"{case.name}, {name} {setting}: {seconds:.2f} s, {found[-1].memory / 1e6:.0f} MB", file=sys.stderr)
    return seconds, found[-1].memory


def in_turns(case: Case, best: Mapping[str, str], threads: int, turns: int) -> dict[str, list[Step]]:
    """Let all sides take their steps in turns, in alternating order. The first step of each side is a warm-up."""
    found: dict[str, list[Step]] = {name: [] for name in best}
    with ExitStack() as stack:
        sides = [stack.enter_context(Side(name, best[name], case.folder, threads)) for name in best]
        for turn in range(turns + 1):
            for side in sides if turn % 2 else reversed(sides):
                found[side.name].append(side.step())
    return found


def rows_of(case: Case, best: Mapping[str, str], found: Mapping[str, list[Step]]) -> Iterator[Row]:
    """Return rows with each side's speed and memory, and the ratios of rollflow's values to each other side's."""
    ours = found["rollflow"]
    for name, steps in found.items():
        side = f"{name} ({best[name]})"
        speed = statistics.median(case.tokens / step.seconds for step in steps[1:])
        yield Row(case.name, f"{side}: tokens/s", speed)
        yield Row(case.name, f"{side}: peak, MB", steps[-1].memory / 1e6)
        if name == "rollflow":
            continue
        pairs = list(zip(ours[1:], steps[1:], strict=True))
        ratios = [theirs.seconds / own.seconds for own, theirs in pairs]
        yield at_least(case.name, f"speed over {name}: median", statistics.median(ratios), FASTER)
        yield Row(case.name, f"speed over {name}: least", min(ratios))
        yield Row(case.name, f"speed over {name}: most", max(ratios))
        yield Row(
            case.name, f"speed over {name}: by processor time", statistics.median(b.cpu / a.cpu for a, b in pairs)
        )
        yield at_most(case.name, f"memory over {name}", ours[-1].memory / steps[-1].memory, LESS_MEMORY)
        for what, found_most in (("losses", _most(ours, steps, "loss")), ("norms", _most(ours, steps, "norm"))):
            yield at_most(case.name, f"{what}, most apart from {name}: 1e-6", 1e6 * found_most, 1e6 * NEAR)


def told(rows: Iterator[Row]) -> list[Row]:
    """Print rows at once, so that an interrupted benchmark has printed them; return them unchanged."""
    found = list(rows)
    for row in found:
        print(f"{row.case}, {row.metric}: {row.value:,.3f}", file=sys.stderr)
    return found


def _most(ours: Sequence[Step], theirs: Sequence[Step], what: str) -> float:
    pairs = [(float(getattr(a, what)), float(getattr(b, what))) for a, b in zip(ours, theirs, strict=True)]
    return max(abs(a - b) / (abs(a) if what == "norm" else 1.0) for a, b in pairs)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=list(SETTINGS), help="name of one workload; `tiny` only tests the benchmark")
    parser.add_argument("--sides", nargs="*", default=["rollflow", "trl", "trl-compact", "plain"])
    parser.add_argument("--settings", nargs="*", default=[], metavar="SIDE=A,B", help="settings to sweep")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--sweep-steps", type=int, default=2, help="number of timed steps of each setting in the sweep")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    names = [name for name in options.sides if name == "plain" or not name.startswith("trl") or _trl_is_here()]
    names = list(dict.fromkeys(["rollflow", *names]))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in [options.only] if options.only else ["quick-start", "wide"]:
            case = written(workload, 0.0, Path(folder))
            given = {name: said.split(",") for name, _, said in (word.partition("=") for word in options.settings)}
            settings = {name: given.get(name, SETTINGS[workload][name]) for name in names}
            best, shown = swept(case, settings, options.threads, options.sweep_steps)
            rows += shown
            for each in (case, written(workload, STILL, Path(folder))):
                rows += told(rows_of(each, best, in_turns(each, best, options.threads, options.turns)))
    if not _trl_is_here():
        print(NO_TRL)
    publish(rows, "a learner's step: rollflow against the others", options.json)


def _trl_is_here() -> bool:
    return importlib.util.find_spec("trl") is not None


if __name__ == "__main__":
    main()
