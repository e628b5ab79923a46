"""Compares rollflow's numbers on a GPU and on a CPU, and measures memory and speed on the GPU. `make gpu` runs it.

    this process --"head"--> a child with torch --ROW {...}--> the table, and the JSON after each part
                             the next child imports in the meantime

Each part (`gpu_checks`, `gpu_memory`, `gpu_engine`, `gpu_bits`, `gpu_speed`) runs in its own process with a time limit.
If a part fails, hangs or breaks the device, the table has a row that says so. Without a GPU all parts run in one
process at a small size, and parts that need a GPU are listed as skipped. The exit code is 1 if a check failed.

The program needs torch, transformers, peft, pyarrow and pydantic, but not Ray, Prefect, vLLM or MLflow. It imports
rollflow from the source tree, installed or not. `--wheels FOLDER` names a folder with wheels of missing packages.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import importlib.util
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from benchmarks.gpu_rows import (
    ERROR,
    NO_GPU,
    WRONG,
    Part,
    Row,
    format_row,
    format_rows,
    name_part,
    read_row,
    save_rows,
    write_row,
)

ROOT = Path(__file__).parents[1]
PARTS = {  # name: its module in `benchmarks`, and its time limit in seconds on a GPU
    "card": ("gpu_speed", 40),
    "learners": ("gpu_checks", 70),
    "head": ("gpu_memory", 40),
    "engine": ("gpu_engine", 60),
    "state": ("gpu_checks", 40),
    "deterministic": ("gpu_checks", 50),
    "memory": ("gpu_memory", 50),
    "recompute": ("gpu_memory", 40),
    "speed": ("gpu_speed", 90),
    "turns": ("gpu_engine", 60),
    "bits": ("gpu_bits", 75),
    "generation": ("gpu_speed", 60),
}
SECONDS = 345.0  # the time limit of all parts together, on a GPU
CPU_SECONDS = 600.0  # the time limit of all parts together without a GPU, which only ends a hang
STARTS = 3  # the largest number of attempts to start a child
READY, ROW, DONE = "READY ", "ROW ", "DONE "
TAIL = 12  # lines of a child's output that are shown in a row if the child crashes


class Child:
    """A child process that imports the packages immediately, and then runs the requested parts."""

    command: ClassVar[Sequence[str]] = (sys.executable, "-m", "benchmarks.gpu", "--child")

    def __init__(self, path: str) -> None:
        """Start the child with `path` as its PYTHONPATH."""
        own = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            list(self.command),
            cwd=ROOT,
            env={**os.environ, **own},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.tail: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def lines(self, seconds: float) -> Iterator[str]:
        """Yield the child's messages until it ends or its time limit is reached; print all other output."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            try:
                line = self._lines.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                return
            if line.startswith((READY, ROW, DONE)):
                yield line
            else:
                self.tail = [*self.tail, line.rstrip()][-TAIL:]
                print(f"    {line.rstrip()}", file=sys.stderr, flush=True)

    def order(self, parts: Sequence[str], limit: float) -> None:
        """Tell the child to run these parts, each for at most `limit` seconds."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{limit} {' '.join(parts)}\n")
            self._process.stdin.flush()
        except OSError:
            print("    it has ended already", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Kill the child."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)


class Kit:
    """Runs the parts of `make gpu`, and keeps the rows of their results."""

    def __init__(self, path: str, seconds: float, file: Path | None) -> None:
        self._path, self._file, self._seconds = path, file, seconds
        self.rows: list[Row] = []

    def run(self, parts: Sequence[str]) -> None:
        """Run these parts. With a GPU, each part runs in its own child process, and the next child starts in the
        meantime.
        """
        until, left, starts = time.monotonic() + self._seconds, list(parts), STARTS
        child = Child(self._path)
        try:
            while left:
                found = self._ready(child)
                if found is None and (starts := starts - 1):
                    child.end()
                    child = Child(self._path)
                    continue
                if found is None:
                    self._lose(child, left, "it could not start")
                    return
                if found == "cpu":
                    self._follow(child, left, CPU_SECONDS)
                    return
                name = left.pop(0)
                limit = min(PARTS[name][1], until - time.monotonic())
                following = Child(self._path) if left else None
                if limit < 5:
                    self._add(name_part(Row("not run", "no time is left", verdict=ERROR), name, 0))
                else:
                    self._follow(child, [name], limit)
                child.end()
                if following is None:
                    return
                child = following
        finally:
            child.end()

    def _ready(self, child: Child) -> str | None:
        """Return the child's device, "gpu" or "cpu". Return None if the child did not start."""
        line = next(child.lines(120), None)
        return line.removeprefix(READY).strip() if line else None

    def _follow(self, child: Child, parts: list[str], limit: float) -> None:
        """Collect the rows of these parts. For an unfinished part, add a row that says why it did not finish."""
        left = list(parts)
        child.order(parts, limit)
        for line in child.lines(limit + 5):
            if line.startswith(ROW):
                self._add(read_row(line.removeprefix(ROW)))
            elif line.startswith(DONE):
                left.remove(line.removeprefix(DONE).strip())
                save_rows(self.rows, self._file)
                if not left:
                    return
        self._lose(child, left, f"it ended early, or took more than {limit:.0f} s")

    def _lose(self, child: Child, parts: Sequence[str], why: str) -> None:
        last = child.tail[-1] if child.tail else "it said nothing"
        for name in parts:
            self._add(name_part(Row("not finished", f"{why}: {last}"[:300], verdict=ERROR), name, 0))

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        print(format_row(row), flush=True)
        save_rows(self.rows, self._file)


def serve() -> None:
    """Run as a child process: import the packages, report this, and run the parts that standard input names."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    map_package()
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    modules = {name: importlib.import_module(f"benchmarks.{module}") for name, (module, _) in PARTS.items()}
    gpu = torch.cuda.is_available()
    print(f"{READY}{'gpu' if gpu else 'cpu'}", flush=True)
    limit, *names = sys.stdin.readline().split() or ["0"]
    for name in names:
        faulthandler.dump_traceback_later(max(1.0, float(limit) - 2))
        part: Part = getattr(modules[name], f"run_{name}")
        began = time.monotonic()
        for row in rows_of(part):
            print(ROW + write_row(name_part(row, name, time.monotonic() - began)), flush=True)
        print(f"{DONE}{name}", flush=True)
    faulthandler.cancel_dump_traceback_later()


def rows_of(part: Part) -> Iterator[Row]:
    """Yield the rows of a part. If the part raises an exception, the last row describes it."""
    from benchmarks.gpu_rows import guard

    yield from guard("the part", part)


def map_package() -> None:
    """Make `rollflow` importable from the source tree, unless it is installed."""
    if importlib.util.find_spec("rollflow") is None:
        package = ModuleType("rollflow")
        package.__path__ = [str(ROOT)]
        sys.modules["rollflow"] = package


def install_wheels(wheels: Path, folder: str) -> str:
    """Install the wheels into `folder`, and return the PYTHONPATH that has it."""
    files = sorted(map(str, wheels.glob("*.whl")))
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--target", folder]
    if files:
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], check=True)
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH", "")]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON, after each part")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of all parts, on a GPU")
    parser.add_argument("--wheels", type=Path, help="a folder with wheels of packages that are not installed")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        serve()
        return
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = install_wheels(options.wheels, folder) if options.wheels else os.environ.get("PYTHONPATH", "")
        kit = Kit(path, options.seconds, options.json)
        kit.run(options.parts)
    save_rows(kit.rows, options.json)
    print(f"\n{format_rows(kit.rows)}")
    wrong = [row for row in kit.rows if row.verdict in WRONG]
    skipped = sum(row.value == NO_GPU for row in kit.rows)
    print(f"\n{len(kit.rows)} rows, {len(wrong)} wrong, {skipped} skipped, {time.monotonic() - began:.0f} s")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
