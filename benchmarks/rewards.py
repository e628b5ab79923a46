"""Measures sandboxes and several reward actors, and simulates the timing of rewards (`reward_schedule`).

    python -m benchmarks.rewards [--only sandboxes places deadlines overlap] [--live N] [--json FILE]

The section `sandboxes` measures their latency, their throughput, and many live sandboxes. A warm sandbox, which is a
copy of an interpreter with finished imports, is compared with a plain fork of such an interpreter without isolation.
The program prints one number, so that a run's time is the time of its sandbox. Nothing else should run on the machine.
The section `places` compares two reward actors with one (`reward_places`). The other sections run on the virtual
clock.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import psutil

from benchmarks.report import Row, arguments, at_least, at_most, publish
from benchmarks.reward_places import measure_places
from benchmarks.reward_schedule import SECTIONS
from rollflow.tasks.sandboxes import build_sandboxes
from rollflow.tasks.sandboxes.base import Program, Sandboxes
from rollflow.tasks.sandboxes.config import BubblewrapSandbox

PROGRAM = Program(code="print(6 * 7)", timeout=60.0)
COLD = Program(command=["python3", "-c", "print(6 * 7)"], timeout=60.0)
RUNS = 500  # number of runs of which the latency is measured
SECONDS = 10.0  # seconds over which the throughput is measured
BESIDE = 8  # number of programs that run at the same time in the measurement of throughput
LIVE = 1000  # default number of sandboxes that are alive at the same time
PAUSE = 0.01  # seconds between two runs of the measurement of latency, in which a spare sandbox is created
MIB = 2**20
FORKS = """
import importlib, json, os, sys, time
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
found = []
for _ in range(int(sys.argv[2])):
    began = time.perf_counter()
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.dup2(write, 1)
        exec(compile(sys.argv[3], "main.py", "exec"), {})
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    assert os.read(read, 100).strip() == b"42"
    os.waitpid(pid, 0)
    os.close(read)
    found.append(1000 * (time.perf_counter() - began))
    time.sleep(float(sys.argv[4]))
print(json.dumps(found))
"""


async def measure_latency(sandboxes: Sandboxes, program: Program, runs: int) -> list[float]:
    """Return the milliseconds of each run, one run after another."""
    found = []
    for _ in range(runs):
        began = time.perf_counter()
        result = await sandboxes.run(program)
        found.append(1000 * (time.perf_counter() - began))
        assert result.stdout == b"42\n", result
        await asyncio.sleep(PAUSE)
    return found


def measure_forks(imports: Sequence[str], runs: int) -> list[float]:
    """Return the milliseconds of each run of the program in a plain fork."""
    command = [sys.executable, "-c", FORKS, json.dumps(imports), str(runs), PROGRAM.code, str(PAUSE)]
    return list(json.loads(subprocess.check_output(command)))


async def measure_throughput(sandboxes: Sandboxes, seconds: float) -> float:
    """Return the runs per second if `BESIDE` callers run programs at the same time."""
    until, began = time.perf_counter() + seconds, time.perf_counter()

    async def call() -> int:
        done = 0
        while time.perf_counter() < until:
            assert (await sandboxes.run(PROGRAM)).succeeded
            done += 1
        return done

    done = sum(await asyncio.gather(*(call() for _ in range(BESIDE))))
    return done / (time.perf_counter() - began)


async def measure_live(sandboxes: Sandboxes, count: int) -> tuple[float, float, float]:
    """Create `count` sandboxes, run a program in each, and close them.

    Return the milliseconds per creation, the MiB of memory per sandbox, and the milliseconds per run.
    """
    before, began = _memory(), time.perf_counter()
    live = [await sandboxes.create() for _ in range(count)]
    creation = time.perf_counter() - began
    began = time.perf_counter()
    for sandbox in live:
        assert (await sandbox.exec(PROGRAM)).succeeded
    runs, memory = time.perf_counter() - began, _memory() - before
    for sandbox in live:
        await sandbox.close()
    return 1000 * creation / count, memory / count / MIB, 1000 * runs / count


def _memory() -> int:
    """Return the memory of this process's children, in bytes; a page that several processes share counts once."""
    found = 0
    for child in psutil.Process().children(recursive=True):
        try:
            found += child.memory_full_info().pss
        except psutil.Error:
            continue
    return found


async def measure(count: int) -> list[Row]:
    """Run all measurements of sandboxes, with `count` live sandboxes."""
    config = BubblewrapSandbox()
    sandboxes = build_sandboxes(config)
    await sandboxes.start()
    try:
        await measure_latency(sandboxes, PROGRAM, RUNS // 10)
        forks = measure_forks(config.imports, RUNS)
        warm = await measure_latency(sandboxes, PROGRAM, RUNS)
        cold = await measure_latency(sandboxes, COLD, RUNS // 10)
        rate = await measure_throughput(sandboxes, SECONDS)
        live = await measure_live(sandboxes, count)
    finally:
        await sandboxes.close()
    return list(_rows(forks, warm, cold, rate, (count, *live)))


def _rows(
    forks: list[float], warm: list[float], cold: list[float], rate: float, live: tuple[int, float, float, float]
) -> Iterator[Row]:
    over = statistics.median(warm) - statistics.median(forks)
    yield Row("a plain fork", "latency, median (ms)", statistics.median(forks))
    yield Row("warm", "latency, median (ms)", statistics.median(warm))
    yield at_most("warm", "over a plain fork, median (ms)", over, 2.0)
    yield at_most("warm", "latency, 99th percentile (ms)", _percentile(warm), 8.0)
    yield Row("a plain fork", "latency, 99th percentile (ms)", _percentile(forks))
    yield Row("a new interpreter", "latency, median (ms)", statistics.median(cold))
    yield at_least(f"{BESIDE} programs at a time", "runs per second", rate, 400.0)
    yield Row(f"{live[0]} live sandboxes", "creation (ms)", live[1])
    yield Row(f"{live[0]} live sandboxes", "memory per sandbox (MiB)", live[2])
    yield Row(f"{live[0]} live sandboxes", "a program in each (ms)", live[3])


def _percentile(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def main() -> None:
    sections: dict[str, Callable[[], Iterable[Row]]] = {
        "sandboxes": lambda: asyncio.run(measure(options.live)),
        "places": measure_places,
        **SECTIONS,
    }
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections), help="sections to run")
    parser.add_argument("--live", type=int, default=LIVE, metavar="N", help="number of live sandboxes")
    options = parser.parse_args()
    rows = [row for section in options.only for row in sections[section]()]
    publish(rows, "Rewards", options.json)


if __name__ == "__main__":
    main()
