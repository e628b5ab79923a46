"""Tests whole runs with Prefect, Ray and MLflow under unusual settings of the process environment; each run tests a
group of settings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from rollflow.flows.services.variables import LONGEST_TMPDIR
from rollflow.storage.audit.audit import audit
from rollflow.storage.objects import open_store
from tests.support.small_run import make_policy
from tests.support.waiting import RUN_SECONDS

pytestmark = [pytest.mark.slow, pytest.mark.soak]

DEAD = "http://127.0.0.1:9"
NOWHERE = "/proc/nowhere"
RECIPE = """
name = "small"
versions = 1
groups = 2
group_size = 2

[policy]
path = "{policy}"

[engine]
kind = "transformers"
max_new_tokens = 4

[evaluation]
every = 0
prompts = 2
"""


@dataclass(frozen=True)
class Settings:
    """The environment of a run's process. In `home` and in values of variables, FOLDER stands for the test's folder,
    which every user can read.
    """

    variables: Mapping[str, str | None] = field(default_factory=dict)  # None: the variable is not set
    home: str = "FOLDER/home"
    shell: str = "true"  # shell command that runs before the run
    redirect: str = ""
    user: int | None = None  # id of a user that is not in /etc/passwd


GROUPS: dict[str, Settings] = {
    "proxies": Settings(
        {
            **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY"), DEAD),
            "NO_PROXY": "",
            "no_proxy": "fd00::/8,example.org",
        }
    ),
    "socks": Settings({"ALL_PROXY": "socks5://127.0.0.1:9", "all_proxy": "socks5h://127.0.0.1:9"}),
    "letters": Settings(
        {"LC_ALL": "C", "LANG": "C", "PYTHONIOENCODING": "ascii"},
        home="FOLDER/a b ü 日本/home",
    ),
    "long names": Settings({"TMPDIR": "LONGEST", "RAY_TMPDIR": f"FOLDER/{'y' * 120}"}, home=f"FOLDER/{'y' * 120}/home"),
    "services": Settings(
        {
            "RAY_ADDRESS": "ray://127.0.0.1:1",
            "RAY_NAMESPACE": "other",
            "RAY_AUTH_TOKEN": "wrong",
            "RAY_RUNTIME_ENV_HOOK": "no.such.hook",
            "MLFLOW_TRACKING_URI": DEAD,
            "MLFLOW_EXPERIMENT_NAME": "other",
            "MLFLOW_RUN_ID": "other",
            "PREFECT_HOME": NOWHERE,
            "PREFECT_PROFILE": "none",
            "PREFECT_API_KEY": "wrong",
            "PREFECT_API_AUTH_STRING": "a:b",
            "PREFECT_SERVER_API_PORT": "no number",
            "AWS_PROFILE": "none",
            "AWS_ENDPOINT_URL": DEAD,
            "AWS_CONFIG_FILE": NOWHERE,
        }
    ),
    "another user": Settings(
        {
            "HOME": None,
            "USER": None,
            "LOGNAME": None,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "none",
            "TZ": "Pacific/Kiritimati",
            "COLUMNS": "20",
            "TERM": "dumb",
            "NO_COLOR": "1",
            "HF_HOME": NOWHERE,
            "XDG_CACHE_HOME": NOWHERE,
            "XDG_CONFIG_HOME": NOWHERE,
            "XDG_RUNTIME_DIR": NOWHERE,
            "MPLCONFIGDIR": NOWHERE,
            "TOKENIZERS_PARALLELISM": "true",
        },
        shell="umask 077",
        redirect="0<&-",
        user=12345,
    ),
    "python": Settings(
        {
            "PYTHONPATH": "FOLDER/modules",
            "PYTHONSTARTUP": "FOLDER/modules/flows.py",
            "PYTHONOPTIMIZE": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCH_LOGS": "+dynamo",
            "RANK": "3",
            "WORLD_SIZE": "4",
            "LOCAL_RANK": "3",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "1",
        }
    ),
    "closed": Settings(
        {"HOME": NOWHERE, "TMPDIR": "FOLDER/nowhere", "TZ": "Nowhere/Land", "COLUMNS": "none", "FORCE_COLOR": "1"},
        home="/dev/shm/rollflow-NUMBER",
        shell="ulimit -n 256",
        redirect="0<&- 1>&- 2>&-",
    ),
}


@pytest.mark.parametrize("group", GROUPS)
def test_run_trains_with_each_group_of_environment_variables(group: str, tmp_path: Path) -> None:
    if group == "socks" and find_spec("socksio") is None:
        pytest.skip("socksio is not installed, and such a run is refused")
    if GROUPS[group].user is not None and not _can_be_another(GROUPS[group].user):
        pytest.skip("nobody here becomes another user, or that one cannot run this Python")
    run_under(GROUPS[group], tmp_path)


def run_under(settings: Settings, folder: Path) -> None:
    """Execute the run until its end, and check that its audit is clean."""
    scratch = tempfile.mkdtemp()
    longest = Path(scratch, "t" * (LONGEST_TMPDIR - len(scratch) - 1))
    place = {"FOLDER": str(folder), "NUMBER": str(os.getpid()), "LONGEST": str(longest)}
    modules = folder / "modules"
    for part in (modules, longest, folder / ("y" * 120)):
        part.mkdir()
    for name in ("flows", "tasks", "storage"):  # a user's own modules with the names of rollflow's packages
        (modules / f"{name}.py").write_text("raise RuntimeError('another module')\n")
    make_policy(folder / "policy")
    home = Path(_filled(settings.home, place))
    recipe = home.parent / f"a recipe {place['NUMBER']}.toml" if home.parent.exists() else folder / "a recipe ü.toml"
    recipe.write_text(RECIPE.format(policy=folder / "policy"))
    variables = {name: _filled(value, place) for name, value in settings.variables.items() if value is not None}
    environment = {**os.environ, "ROLLFLOW_HOME": str(home), "PREFECT_API_URL": "", **variables}
    for name in settings.variables.keys() - variables.keys():
        environment.pop(name, None)
    command = [sys.executable, "-m", "rollflow.flows.commands.cli", "run", str(recipe), "--run-id", "one"]
    if settings.user is not None:
        subprocess.run(["chown", "-R", str(settings.user), str(folder)], check=True)
        for part in (folder, *folder.parents[:2]):
            part.chmod(0o755)
        command = [*_become(settings.user), *command]
    line = f'{settings.shell}; exec "$@" {settings.redirect}'
    ended = subprocess.run(
        ["bash", "-c", line, "bash", *command], env=environment, cwd=folder, capture_output=True, timeout=RUN_SECONDS
    )
    said = (ended.stdout + ended.stderr).decode(errors="replace")
    assert ended.returncode == 0, said[-4000:]
    assert "Traceback" not in said
    run = open_store(f"{home}/store/runs/one")
    assert audit(run).clean
    assert json.loads(run.get("summary.json"))["versions"] == 1


def _become(user: int) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def _can_be_another(user: int) -> bool:
    """Return whether this process is root and can run Python as another user."""
    command = [*_become(user), "bash", "-c", '"$0" -c ""; exit $?', sys.executable]
    return os.getuid() == 0 and subprocess.run(command, capture_output=True).returncode == 0


def _filled(value: str, place: Mapping[str, str]) -> str:
    for name, meant in place.items():
        value = value.replace(name, meant)
    return value
