"""Tests the commands with which the client of a ROCK server runs programs as other users; root runs the commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from rollflow.tasks.sandboxes.base import NO_VARIABLES, UserRefused
from rollflow.tasks.sandboxes.rock_users import PREPARE, check_prepared, limit_command

PATH = "/usr/bin:/bin"  # folders with a Python interpreter that every user can read
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("python3", path=PATH) is None, reason="not root, or no python3 for every user"
)

NOBODY = "nobody"


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a sandbox's folder, which every user can enter."""
    found = Path(tempfile.mkdtemp())
    found.chmod(0o755)
    yield found
    shutil.rmtree(found)


def become(user: str, command: list[str], source: str = "", env: Mapping[str, str] = NO_VARIABLES) -> list[str]:
    """Return the command that root runs for a user's program."""
    return limit_command(command, user, 60.0, env, source)


def call(command: list[str], folder: Path, user: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command as root, or as an ordinary user."""
    within = ["setpriv", f"--reuid={user}", "--clear-groups"] if user else []
    env = {"PATH": PATH}
    return subprocess.run([*within, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)


def prepare(folder: Path, user: str, by: str = "") -> None:
    """Prepare the folders for a user; raise `UserRefused` if programs cannot run as the user."""
    command = ["python3", "-I", "-c", PREPARE, user, str(folder / "work"), str(folder / "given")]
    found = call(command, Path("/"), by)
    check_prepared(user, found.stdout, found.stderr)


def run_as(folder: Path, user: str, code: str) -> str:
    """Run Python source as a user in the working folder; return what the program printed."""
    source = folder / "given" / "main.py"
    source.write_text(code)
    found = call(become(user, ["python3"], str(source)), folder / "work" / user)
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


def test_files_belong_to_the_user_and_are_closed_to_others(folder: Path) -> None:
    for user in (NOBODY, "daemon"):
        prepare(folder, user)
    code = "import os; os.close(os.open('secret', os.O_CREAT | os.O_WRONLY, 0o600)); print(os.getuid(), os.getgroups())"
    assert run_as(folder, NOBODY, code) == "65534 [65534]"
    assert (folder / "work" / NOBODY / "secret").owner() == NOBODY
    (folder / "work" / "shared").write_text("for all")
    trial = "try:\n    {}\nexcept PermissionError:\n    print('refused')\nelse:\n    print('done')"
    actions = [f"open('../{NOBODY}/secret')", f"import os; os.listdir('../{NOBODY}')", "open('../../given/main.py')"]
    for action in (*actions, "open('../random.py', 'w')", "import os; os.symlink('/etc', '../other')"):
        assert run_as(folder, "daemon", trial.format(action)) == "refused", action
    assert run_as(folder, "daemon", trial.format("assert open('../shared').read() == 'for all'")) == "done"
    assert run_as(folder, NOBODY, trial.format("open('secret').read()")) == "done"


def test_program_of_a_user_has_no_root_rights(folder: Path) -> None:
    prepare(folder, NOBODY)
    code = """
import os
for call in (os.setuid, os.setgid):
    try:
        call(0)
    except PermissionError:
        print("refused")
names = ("CapInh", "CapPrm", "CapEff", "CapAmb")
print([line.split()[1] for line in open("/proc/self/status") if line.startswith(names)])
print(os.getresuid(), os.getresgid(), os.environ["USER"])
"""
    *refused, capabilities, ids = run_as(folder, NOBODY, code).splitlines()
    assert refused == ["refused", "refused"]
    assert capabilities == str(["0" * 16] * 4)
    assert ids == "(65534, 65534, 65534) (65534, 65534, 65534) nobody"


def test_command_of_a_user_imports_nothing_from_its_folder(folder: Path) -> None:
    """A user may write into the folder in which root starts the next program of the user."""
    prepare(folder, NOBODY)
    write = "open(f'{name}.py', 'w').write('print(1); raise SystemExit')"
    run_as(folder, NOBODY, f"for name in ('pwd', 'os', 'sys', 'warnings'): {write}")
    found = call(become(NOBODY, ["id", "-un"]), folder / "work" / NOBODY)
    assert (found.stdout, found.stderr) == ("nobody\n", "")


def test_variables_of_a_user_do_not_reach_the_programs_of_root(folder: Path) -> None:
    """A folder in the user's PATH contains a program with the name of each program that root starts."""
    prepare(folder, NOBODY)
    programs = folder / "work" / NOBODY / "bin"
    programs.mkdir()
    for name in ("timeout", "python3", "env", "tool"):
        (programs / name).write_text("#!/bin/sh\nid -un\n")
        (programs / name).chmod(0o755)
    found = call(become(NOBODY, ["tool"], env={"PATH": f"{programs}:{PATH}"}), folder / "work" / NOBODY)
    assert found.stdout == "nobody\n"


def test_unknown_command_of_a_user_ends_with_code_127(folder: Path) -> None:
    prepare(folder, NOBODY)
    found = call(become(NOBODY, ["no-such-command"]), folder / "work" / NOBODY)
    assert (found.returncode, "Traceback" in found.stderr) == (127, False)


def test_user_that_root_cannot_become_is_refused(folder: Path) -> None:
    without = ["setpriv", "--bounding-set=-setuid,-setgid"]
    command = [*without, "python3", "-I", "-c", PREPARE, NOBODY, str(folder / "work"), str(folder / "given")]
    found = call(command, folder)
    with pytest.raises(UserRefused, match="cannot be prepared for the user: PermissionError"):
        check_prepared(NOBODY, found.stdout, found.stderr)


@pytest.mark.parametrize("umask", [0o077, 0o000])
def test_user_cannot_replace_sandbox_folders_at_any_umask(folder: Path, umask: int) -> None:
    """A user can enter the sandbox's folder, but cannot replace the folders in it."""
    before = os.umask(umask)
    try:
        prepare(folder / "sandbox", NOBODY)
    finally:
        os.umask(before)
    trial = "import os\ntry:\n    os.rename(os.path.dirname(os.getcwd()), '../../other')\nexcept OSError:\n    "
    assert run_as(folder / "sandbox", NOBODY, f"{trial}print(os.listdir(os.getcwd()))") == "[]"


@pytest.mark.parametrize(
    ("user", "by", "reason"),
    [
        ("someone", "", "the sandbox has no such user"),
        ("nobody", "1", "programs of this sandbox start as user 1, who cannot become another user"),
        ("0", "1", "the sandbox has no such user"),
        ("root", "1", "start as user 1"),
    ],
)
def test_user_that_programs_cannot_become_is_refused(folder: Path, user: str, by: str, reason: str) -> None:
    folder.chmod(0o777)
    with pytest.raises(UserRefused, match=reason):
        prepare(folder, user, by)


def test_program_of_the_sandbox_user_needs_no_root(folder: Path) -> None:
    folder.chmod(0o777)
    for user in ("1", "daemon"):
        prepare(folder, user, "1")
    assert call(become("1", ["id", "-u"]), folder, "1").stdout == "1\n"


def test_user_whose_folder_cannot_be_created_is_refused(folder: Path) -> None:
    (folder / "work").mkdir()
    (folder / "work" / NOBODY).write_text("a file")
    with pytest.raises(UserRefused, match="cannot be prepared for the user: FileExistsError"):
        prepare(folder, NOBODY)
