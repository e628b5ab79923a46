"""Runs programs as users other than root in the sandboxes of a ROCK server, where each program starts as root.

A short Python program starts as root, changes to the user, and is then replaced by the requested program. The change of
the user cannot be undone: the new process has no capabilities and only the groups of the user.

Each user has a folder in the sandbox's folder, which only the user and root can enter. Separate folders keep a user
from putting a module or a link where a program of another user looks for it. Stdin and source code of the next program
are in a folder that only root can enter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from rollflow.tasks.sandboxes.base import UserRefused

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}")  # so that a server cannot take a name for an option or a command
READY, MISSING = "ready", "missing"
CHANGE_USER = """
import os, pwd, sys, warnings
def change_user(one):
    os.initgroups(one.pw_name, one.pw_gid)
    os.setgid(one.pw_gid)
    os.setuid(one.pw_uid)
"""
# program that prepares the folders of a user, and prints whether programs can run as this user
PREPARE = f"""{CHANGE_USER}
user, work, given = sys.argv[1:]
own, one = os.geteuid(), None
try:
    one = pwd.getpwnam(user)
    found = "ready" if own in (0, one.pw_uid) else str(own)
except KeyError:
    found = "ready" if user == str(own) else "missing"
if found == "ready":
    for folder, mode in ((work, 0o755), (given, 0o700), (os.path.join(work, user), 0o700)):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, mode)
    if own == 0:
        os.chmod(os.path.dirname(work), 0o755)
    if own == 0 and one:
        os.chown(folder, one.pw_uid, one.pw_gid)
        change_user(one)
    os.chdir(folder)
print(found)
"""
# program that becomes the user and then the command; the user cannot read the file with the source code
BECOME = f"""{CHANGE_USER}
user, source, *command = sys.argv[1:]
one = None if os.geteuid() or user == "0" else pwd.getpwnam(user)
if one and source:
    code = os.memfd_create("main.py", 0)
    with open(source, "rb") as file, open(code, "wb", closefd=False) as copy:
        copy.write(file.read())
    source = f"/proc/self/fd/{{code}}"
command += [source] if source else []
if one:
    change_user(one)
    os.environ.update(USER=user, LOGNAME=user)
os.execvp(command[0], command)
"""


def check_name(user: str) -> None:
    """Raise `UserRefused` if a text cannot be the name of a user."""
    if NAME.fullmatch(user) is None:
        raise UserRefused(f"user = {user!r} is not a valid name of a user; use letters, digits, _ - and .")


def check_prepared(user: str, printed: str, error: str) -> None:
    """Check the output of the program `PREPARE` on stdout and stderr.

    Raises:
        UserRefused: programs cannot run as this user.
    """
    found = printed.strip()
    if found == MISSING:
        raise UserRefused(f"user = {user!r}: the sandbox has no such user; create the user in the sandbox's image")
    if not found:
        reason = error.strip().rpartition("\n")[2]
        raise UserRefused(f"user = {user!r}: the sandbox cannot be prepared for the user: {reason}")
    if found != READY:
        raise UserRefused(
            f"user = {user!r}: programs of this sandbox start as user {found}, who cannot become another "
            "user; use an image whose programs start as root, or leave out the user"
        )


def limit_command(
    command: Sequence[str], user: str, seconds: float, variables: Mapping[str, str], source: str = ""
) -> list[str]:
    """Return a command that runs `command` with the environment variables, and kills it after `seconds`. The last
    argument of `command` is the path of the file `source` or of a copy of the file.

    For another user, the variables are set after the change of the user. Otherwise, a PATH with a folder of the user
    would let the user run programs as root.
    """
    limit = ["timeout", "-s", "KILL", f"{seconds:.3f}"]
    given = ["env", *(f"{name}={value}" for name, value in variables.items())]
    if user:
        return [*limit, "python3", "-I", "-c", BECOME, user, source, *given, *command]
    return [*given, *limit, *command, *([source] if source else [])]
