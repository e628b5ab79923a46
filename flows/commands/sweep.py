"""Implements `rollflow sweep RECIPE`, which trains one run for each combination of configuration values and seeds, one
after another, and compares the runs.

    rollflow sweep RECIPE --set train.learning_rate=1e-4,3e-4 --seeds 3       six runs

The runs of a sweep form a study, which is their parent run in MLflow. To continue a stopped study, give the same
command with the study's name; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from signal import SIGINT, SIGTERM

from rich.console import Console

from rollflow.flows.commands.cli.exit_codes import FAILED, INTERRUPTED, OK
from rollflow.flows.commands.compare import compared_table
from rollflow.flows.config import load_recipe
from rollflow.flows.locations import context_of, new_run_id, run_home, store_uri
from rollflow.flows.preflight import check_addresses, preflight
from rollflow.flows.prepare import prepare
from rollflow.flows.views.compare import read_compared
from rollflow.flows.views.compare_page import compare_page
from rollflow.flows.views.summary import read_summary
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import entry_path
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.runtime.names import LONGEST_RECIPE
from rollflow.tasks.runtime.names import run_id as checked

MOST = 1000  # Largest number of runs in a study (one call of `rollflow sweep`).


@dataclass(frozen=True, slots=True)
class SweepRun:
    """One run of a study (a set of compared runs): its id, its configuration, and text that says how it differs from
    the other runs.
    """

    run_id: str
    config: RunConfig
    words: str

    @property
    def context(self) -> RunContext:
        """The run context, which gives access to the run's storage. The run may not exist yet."""
        return context_of(store_uri(self.config), self.run_id)


def command(options: argparse.Namespace) -> int:
    """Check all runs of the study, then train them one after another and compare the results. A failed run does not
    stop the study.
    """
    points = points_of(options)
    checked_configs = set[str]()
    for point in points:
        if _is_begun(point):
            check_addresses(point.config, store_uri(point.config))
            continue
        seedless = point.config.model_copy(update={"seed": 0}).sha256()
        if seedless not in checked_configs:  # one check for all seeds, because no check depends on the seed
            preflight(point.config, download=False)
            checked_configs.add(seedless)
    failed = [point for number, point in enumerate(points) if not _complete_run(point, number, len(points))]
    runs = read_compared([point.context for point in points if point not in failed])
    if runs:
        page = run_home() / f"{points[0].config.tracking.study}.html"
        page.write_text(compare_page(runs))
        Console(highlight=False).print(compared_table(runs))
        print(f"page: {page}")
    for point in failed:
        print(f"failed: {point.run_id} ({point.words})")
    return FAILED if failed else OK


def points_of(options: argparse.Namespace) -> list[SweepRun]:
    """Return the runs of a study in order. The runs with the first combination of values come first, one for each seed.

    Raises:
        ConfigError: a value or the name of the study is invalid.
    """
    _check_values(options.set)
    varied = list(combine_values(options.set))
    # The first combination of values is applied here, because the recipe may be incomplete without it.
    first = load_recipe(options.recipe, varied[0])
    study = checked(options.study or new_run_id(f"{first.name}-sweep"), "--study")
    if len(study) > LONGEST_RECIPE:
        raise ConfigError(
            f"--study {study!r} is too long, because the name becomes a part of run ids; give at most "
            f"{LONGEST_RECIPE} letters"
        )
    count = len(varied) * options.seeds
    if count == 1:
        several = "--set train.learning_rate=1e-4,3e-4, or --seeds 3"
        raise ConfigError(f"a sweep needs several values or seeds, e.g. {several}; for one run use `rollflow run`")
    if count > MOST:
        raise ConfigError(
            f"--seeds {options.seeds}: the sweep would have {count} runs, but at most {MOST} are allowed; give "
            "fewer values or seeds"
        )
    found = []
    for (number, sets), seed in product(enumerate(varied), range(options.seeds)):
        config = load_recipe(options.recipe, [*sets, f"tracking.study={study}"])
        config = load_recipe(options.recipe, [*sets, f"tracking.study={study}", f"seed={config.seed + seed}"])
        words = ", ".join([*(one for one in sets if one not in _list_fixed(options.set)), f"seed {config.seed}"])
        found.append(SweepRun(f"{study}-{number}-s{config.seed}", config, words))
    return found


def _check_values(sets: Sequence[str]) -> None:
    """Reject a configuration key that is given twice, a missing value, and a value that is given twice."""
    keys = set[str]()
    for override in sets:
        key, _, text = (part.strip() for part in override.partition("="))
        values = _split_values(text)
        if not key or not all(values):
            cure = "give each value, e.g. --set train.learning_rate=1e-4,3e-4"
            raise ConfigError(f"--set {override!r}: a value is missing; {cure}")
        if key in keys:
            raise ConfigError(f"--set {override!r}: {key} is given twice; put its values into one --set, with commas")
        if twice := next((one for one in values if values.count(one) > 1), None):
            raise ConfigError(f"--set {override!r}: the value {twice} is given twice; use --seeds to repeat a value")
        keys.add(key)


def combine_values(sets: Sequence[str]) -> Iterator[list[str]]:
    """Yield every combination of the values in the given overrides. An override such as `a=1,2` has two values. A comma
    within brackets or quotes does not separate values.
    """
    for chosen in product(*(_list_values(one) for one in sets)):
        yield list(chosen)


def _list_values(override: str) -> list[str]:
    key, _, text = override.partition("=")
    return [f"{key}={value}" for value in _split_values(text)]


def _split_values(text: str) -> list[str]:
    """Split text into values at its commas, except at commas within brackets or quotes."""
    parts, begun = list[str](), ""
    for piece in text.split(","):
        begun = f"{begun},{piece}" if begun else piece
        if _is_whole(begun):
            parts.append(begun.strip())
            begun = ""
    return [*parts, begun.strip()] if begun else parts


def _is_whole(text: str) -> bool:
    """Return whether the text is a complete value, without an open bracket or quote."""
    if not text.strip().startswith(("[", "{", '"', "'")):
        return True
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return False
    return True


def _list_fixed(sets: Sequence[str]) -> list[str]:
    """Return the overrides that have only one value, because that value is the same in all runs."""
    return [one for override in sets if len(values := _list_values(override)) == 1 for one in values]


def _is_begun(point: SweepRun) -> bool:
    """Return whether the run exists. Raise `ConfigError` if a run with the same run id exists that has other
    configuration values.
    """
    context = point.context
    if not context.store.exists(entry_path(0)):
        return False
    if context.all_configs[0] != point.config:
        raise ConfigError(
            f"--study: run {point.run_id!r} of this study exists already, and has other values; give the study "
            "another name"
        )
    return True


def _complete_run(point: SweepRun, number: int, count: int) -> bool:
    """Train a run to its end, unless it has ended already; return whether the run has ended successfully."""
    context = point.context
    print(f"--- {number + 1} of {count}: {point.words}", flush=True)
    if read_summary(context).get("audit") == "clean":
        print(f"run {point.run_id} is done", flush=True)
        return True
    if not context.store.exists(entry_path(0)):
        context = prepare(point.config, point.run_id)
    code = drive(context)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    return code == OK


def drive(context: RunContext) -> int:
    """Run `rollflow resume` in a child process, and return its exit code. If the user interrupts the parent process,
    return `INTERRUPTED`.

    The child process starts its own Prefect server and Ray cluster. The child process is stopped together with this
    process.
    """
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "resume", context.uri]
    # The child process has its own session, so that Ctrl-C does not reach it. The function `end` stops the child.
    child = subprocess.Popen(command, start_new_session=True)
    signals = list[int]()

    def end(number: int, _: object) -> None:
        signals.append(number)
        child.terminate()

    before = {number: signal.signal(number, end) for number in (SIGINT, SIGTERM)}
    try:
        code = child.wait()
        return INTERRUPTED if signals else code
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
