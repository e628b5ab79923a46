"""Simulates the timing of rewards: adaptive deadlines of test cases, and scoring while other responses are generated.

Both sections run on the virtual clock, with the shipped scheduler (`rollflow plan`). The first section also runs the
shipped scorer of programs, its deadlines and its rechecks. The simulation replaces the engines, the learner, and the
sandboxes in which programs run; these parts take drawn times. No program runs, so the results say nothing about
sandboxes.

The workload of the first section is that of RollPacker's figure 13c (arXiv 2509.21009), as far as it is published:

- in its configuration: 44 prompts x 8 responses of up to 8,192 tokens, tail batching with eta 1.25, 32 reward workers,
  T_min 2 s, T_max 30 s; lambda is 1.5 in the paper, and 2 in the code;
- in its text: 5% of the prompts hit T_max. The sentence may mean prompts or responses, so both are simulated;
- in its data file `codeprompt_hash2time.json`: `SECONDS`, the times of the reference solutions to 1,986 prompts of
  KodCode (15 more took its limit of 20 s, and are left out);
- in its figure: a short round takes 23 s without slow scores, a long round 73 s. `MEDIAN` and `TOKEN_SECONDS` are
  chosen so that simulated rounds take these times.

Chosen freely: half of the responses are correct; a correct program takes the time of the prompt's reference solution,
times a lognormal factor; a wrong program either ends quickly or never.
"""

from __future__ import annotations

import asyncio
import bisect
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

from benchmarks.baselines import BatchRun
from benchmarks.report import Row, at_least, at_most
from benchmarks.workloads import bias, changed, ran, recipe, rollout_only
from rollflow.storage.records import Prompt
from rollflow.storage.run_records.case_anchors import CaseAnchors
from rollflow.tasks.sandboxes.base import Capability, ExecResult, Program, ProgramEnd
from rollflow.tasks.scorers.base import Score, ScoreRequest
from rollflow.tasks.scorers.code.config import AdaptiveDeadline
from rollflow.tasks.scorers.code.deadlines import CLOCK, CaseClock, DeadlineReport, Rechecks, name_row
from rollflow.tasks.scorers.code.scorer import CodeScorer
from rollflow.tasks.scorers.config import CodeReward
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware, RewardHardware
from rollflow.tasks.simulation.parts import SimulatedPrompts, TimedRewards
from rollflow.tasks.simulation.records import SimulationRecords
from rollflow.tasks.simulation.world import SimulatedRun

LONGEST = 30.0  # T_max, in seconds
SECONDS = (  # (share, seconds): this share of the reference solutions takes at most so many seconds
    (0.0, 0.026), (0.05, 0.028), (0.25, 0.029), (0.5, 0.031), (0.75, 0.036), (0.9, 0.078), (0.95, 0.124),
    (0.96, 0.171), (0.97, 0.304), (0.975, 0.546), (0.98, 0.773), (0.985, 1.027), (0.99, 1.451), (0.992, 2.106),
    (0.995, 4.182), (0.998, 10.104), (1.0, 16.456),
)  # fmt: skip
STEPS = 20  # steps of one pass over the prompts, as in the figure
PROMPTS, SIZE, WORKERS, CAP = 44, 8, 32, 8192
TOKEN_SECONDS, MEDIAN = 73 / CAP, 900
WRONG_SECONDS = 0.05
SHARES = {"RollPacker's code tasks": (66, 13, 21), "the same with tail batching": (53, 22, 25)}
OVERLAP_STEPS = 20


# --- adaptive deadlines -------------------------------------------------------------------------------------


def draw_reference_seconds(row: int) -> float:
    """Draw the seconds of a prompt's reference solution from the published times."""
    share = random.Random(f"reference {row}").random()
    place = min(bisect.bisect([at for at, _ in SECONDS], share), len(SECONDS) - 1)
    (low, fast), (high, slow) = SECONDS[place - 1], SECONDS[place]
    return fast * math.pow(slow / fast, (share - low) / (high - low))


class DrawnSandboxes:
    """Simulated sandboxes. A program is text such as "0.5 right": it runs for 0.5 seconds and prints "right". With
    "inf", it never ends.
    """

    capabilities = frozenset[Capability]()

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    async def run(self, program: Program, files: Mapping[str, bytes] | None = None) -> ExecResult:
        """Wait for the program's seconds, or until its deadline."""
        seconds, printed = program.code.split()
        lasts = float(seconds)
        await asyncio.sleep(min(lasts, program.timeout))
        if lasts <= program.timeout:
            return ExecResult(ProgramEnd.EXITED, 0, printed.encode(), b"", lasts)
        self.counts["false kills"] += lasts <= LONGEST
        return ExecResult(ProgramEnd.TIMEOUT, -9, b"", b"", program.timeout)


class ProgramPrompts(SimulatedPrompts):
    """Prompts with one test case each, which are asked again after `STEPS` steps."""

    def at(self, index: int) -> Prompt:
        """Return the prompt at an index."""
        row = index % (STEPS * PROMPTS)
        case = {"stdin": str(row), "stdout": "right"}
        seconds = draw_reference_seconds(row)
        return replace(super().at(index), reference={"accuracy": 0.5, "row": row, "cases": [case], "seconds": seconds})


class ProgramRewards(TimedRewards):
    """Scores programs that are drawn at random, with the shipped scorer and `WORKERS` workers."""

    adaptive: ClassVar[AdaptiveDeadline | None] = None
    hanging: ClassVar[float] = 0.1  # share of the wrong programs that never end
    spread: ClassVar[float] = 0.25  # sigma of the random factor in a correct program's time
    last: ClassVar[ProgramRewards]  # the rewards of the newest simulation

    def __init__(self, reward: RewardHardware, seed: int, records: SimulationRecords) -> None:
        super().__init__(reward, seed, records)
        self.sandboxes, self.anchors = DrawnSandboxes(), CaseAnchors()
        config = CodeReward(case_seconds=LONGEST, fenced=False, adaptive=self.adaptive)
        self._scorer = CodeScorer(config, self.sandboxes)  # type: ignore[arg-type]  # the scorer only runs programs
        self._rechecks = Rechecks(lambda: self.gauge.active == 0, self._note)
        self._seen: Counter[int] = Counter()
        type(self).last = self

    async def score(self, request: ScoreRequest) -> Score:
        """Score one response as a worker does."""
        self._records.last_generation = asyncio.get_running_loop().time()
        name = name_row(request.reference)
        program = self._draw_program(request.reference["row"])
        assert self._room is not None
        async with self._room:
            self.gauge.change(1)
            clock = CaseClock(name, self.anchors.list_row(name))
            CLOCK.set(clock)
            score = await self._scorer.score(program, request.reference)
            self._note(clock.report)
            self.gauge.change(-1)
        self._rechecks.add(clock)
        self._rechecks.begin()
        return score

    def _note(self, report: DeadlineReport) -> None:
        report.add_to(self.anchors)

    def _draw_program(self, row: int) -> str:
        """Draw the next program for a row. Both sides of a comparison draw the same programs."""
        self._seen[row] += 1
        draw = random.Random(f"{row} {self._seen[row]}")
        if draw.random() < 0.5:
            self.sandboxes.counts["correct"] += 1
            return f"{draw_reference_seconds(row) * math.exp(self.spread * draw.gauss(0.0, 1.0))} right"
        return "inf never" if draw.random() < self.hanging else f"{WRONG_SECONDS} wrong"


class ProgramRun(SimulatedRun):
    """A simulated run whose responses are programs."""

    prompts_type = ProgramPrompts
    rewards_type = ProgramRewards


def run_programs(adaptive: AdaptiveDeadline | None, **keys: float) -> tuple[Figures, ProgramRewards]:
    """Simulate two passes over the prompts; `keys` sets attributes of `ProgramRewards`."""
    kind = type("Rewards", (ProgramRewards,), {"adaptive": adaptive, **keys})
    world = type("Run", (ProgramRun,), {"rewards_type": kind})
    config = recipe(0, PROMPTS, SIZE, cap=CAP, tail_batching=True, redundant_groups=11, redundant_responses=2)
    hardware = rollout_only(8, 128, median=MEDIAN, cap=CAP)
    hardware = changed(hardware, engines={"seconds_per_token": TOKEN_SECONDS}, reward={"workers": WORKERS})
    figures = ran(config, hardware, 2 * STEPS, world)
    return figures, kind.last  # type: ignore[attr-defined]


def deadlines() -> Iterator[Row]:
    """Simulate a fixed deadline of 30 s, and RollPacker's adaptive deadline."""
    no_limit, _ = run_programs(None, hanging=0.0, spread=0.0)
    short, long = statistics.median(no_limit.steps), max(no_limit.steps)  # a fifth of the rounds are long rounds
    yield Row("44 x 8 responses, no program hangs", "short round, s (published, read from a figure: 23)", short)
    yield Row("44 x 8 responses, no program hangs", "long round, s (published, read from a figure: 73)", long)
    for what, hanging, spread in (
        ("5% of responses hang", 0.1, 0.25),
        ("5% of responses hang", 0.1, 1.0),
        ("5% of prompts have a response that hangs", 0.0128, 0.25),
    ):
        yield from _compare_deadlines(f"{what}, sigma {spread:g}", hanging, spread)


def _compare_deadlines(case: str, hanging: float, spread: float) -> Iterator[Row]:
    fixed, _ = run_programs(None, hanging=hanging, spread=spread)
    ours, rewards = run_programs(AdaptiveDeadline(), hanging=hanging, spread=spread)
    for name, steps in (("first pass", slice(0, STEPS)), ("second pass", slice(STEPS, 2 * STEPS))):
        ratios = [before / after for before, after in zip(fixed.steps[steps], ours.steps[steps], strict=True)]
        metric = f"{name}: fixed over adaptive, mean over steps (published 1.6)"
        mean = statistics.mean(ratios)
        yield at_least(case, metric, mean, 1.6) if name == "second pass" else Row(case, metric, mean)
        yield Row(case, f"{name}: fixed over adaptive, whole time", sum(fixed.steps[steps]) / sum(ours.steps[steps]))
    yield from _count_kills(case, rewards)
    known, rewards = run_programs(AdaptiveDeadline(reference_column="seconds"), hanging=hanging, spread=spread)
    first = [before / after for before, after in zip(fixed.steps[:STEPS], known.steps[:STEPS], strict=True)]
    name = "first pass, with the references' times from the data"
    yield at_least(case, f"{name}: fixed over adaptive, mean over steps (published 1.6)", statistics.mean(first), 1.6)
    yield Row(case, f"{name}: whole time", sum(fixed.steps[:STEPS]) / sum(known.steps[:STEPS]))
    yield from _count_kills(f"{case}, with the references' times from the data", rewards)


def _count_kills(case: str, rewards: ProgramRewards) -> Iterator[Row]:
    """Return the numbers of early kills and of false kills of a simulation, summed over both passes."""
    counts, anchors = rewards.sandboxes.counts, rewards.anchors
    share = 100 * counts["false kills"] / max(counts["correct"], 1)
    yield at_most(case, "false kills, % of the correct programs", share, 0.5)
    yield Row(case, "early kills", anchors.kills)
    yield Row(case, "false kills", counts["false kills"])
    yield Row(case, "false kills, % of the early kills", 100 * counts["false kills"] / max(anchors.kills, 1))
    yield Row(case, "early kills that ran again", anchors.rechecked)
    yield Row(case, "of these, false kills", anchors.false_kills)


# --- rewards beside rollout ---------------------------------------------------------------------------------


def overlap() -> Iterator[Row]:
    """Simulate scoring after the rollout of a batch and during it, with the published shares of a step.

    The bound is a step without any time for rewards. All responses of a batch fit into the engines' slots. With tail
    batching, most rounds have no long response, so the lengths are those below the 80th percentile.
    """
    for case, shares in SHARES.items():
        hardware, config = _scale(case, shares), recipe(0, 128, 8)
        after, beside = (ran(config, hardware, OVERLAP_STEPS, kind) for kind in (BatchRun, SimulatedRun))
        assert after.shares is not None
        names = f"{case}: {' / '.join(map(str, shares))}"
        for name, share in zip(("rollout", "reward", "train"), shares, strict=True):
            yield Row(names, f"rewards after rollout: {name}, % (published {share})", 100 * getattr(after.shares, name))
        bound = 1.0 / (1.0 - after.shares.reward)
        speedup = after.step_seconds / beside.step_seconds
        yield Row(names, "bound", bound)
        yield Row(names, "beside rollout over after rollout", speedup)
        yield at_least(names, "share of the bound", speedup / bound, 0.97)
        yield from bias(names, beside, limit=0.01)


def _scale(case: str, shares: tuple[int, int, int]) -> Hardware:
    """Return hardware on which rollout, reward and training take the given shares of a step."""
    draw = random.Random(f"lengths of {case}")
    lengths = sorted(min(CAP, MEDIAN * math.exp(draw.gauss(0.0, 1.0))) for _ in range(10_000))
    if case != next(iter(SHARES)):
        lengths = lengths[: int(0.8 * len(lengths))]
    measured = tuple(max(1, round(length)) for length in lengths)
    hardware = changed(
        rollout_only(8, 128, lengths=measured, cap=CAP),
        engines={"seconds_per_token": TOKEN_SECONDS},
        reward={"workers": WORKERS, "sigma": 1.0},
    )
    config = recipe(0, 128, 8)
    rollout = ran(config, hardware, 6, BatchRun).step_seconds
    rewards, training = rollout * shares[1] / shares[0], rollout * shares[2] / shares[0]
    per_score = rewards * WORKERS / (config.groups * config.group_size)
    for _ in range(2):  # repeated, because the last scores of a batch do not keep all workers busy
        hardware = changed(hardware, reward={"seconds": per_score}, learner={"seconds_per_version": training})
        found = ran(config, hardware, 6, BatchRun).shares
        assert found is not None
        per_score *= shares[1] / (100 * found.reward)
    return changed(hardware, reward={"seconds": per_score})


SECTIONS: dict[str, Callable[[], Iterator[Row]]] = {"deadlines": deadlines, "overlap": overlap}
