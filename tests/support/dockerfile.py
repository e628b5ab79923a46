"""Runs the steps of a Dockerfile in a folder that becomes the root, without a container engine.

`debian:12-slim` is replaced by the smallest variant of Debian 12 that debootstrap creates. FROM, ARG, ENV, WORKDIR,
RUN, COPY and USER work as in Docker; RUN gets the mounts that it asks for from folders of the caller.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

BASES = {"debian:12-slim": "bookworm"}
MOUNT = re.compile(r"--mount=from=(\w+),target=(\S+)\s+")


@dataclass
class Stage:
    """One `FROM ... AS name` and its steps."""

    parent: str
    steps: list[tuple[str, str]] = field(default_factory=list)


def stages(file: Path) -> dict[str, Stage]:
    """Parse a Dockerfile into its named stages."""
    text = re.sub(r"^\s*#.*\n", "", file.read_text(), flags=re.MULTILINE)
    found: dict[str, Stage] = {}
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        verb, _, rest = line.strip().partition(" ")
        if verb == "FROM":
            parent, _, name = rest.partition(" AS ")
            found[name] = stage = Stage(parent)
        elif verb:
            stage.steps.append((verb, rest.strip()))
    return found


def steps(file: Path, target: str) -> Iterator[tuple[str, str]]:
    """Yield the steps that make a target: the steps of its base stages come first."""
    known = stages(file)
    stage = known[target]
    if stage.parent in known:
        yield from steps(file, stage.parent)
    else:
        yield "FROM", stage.parent
    yield from stage.steps


class Root:
    """A folder that is the root of an image under construction."""

    def __init__(self, folder: Path, context: Path, mounts: Mapping[str, Path], arguments: Mapping[str, str]) -> None:
        """Prepare the root; `arguments` are build arguments, such as a registry's address."""
        self.folder, self.context, self.mounts, self.arguments = folder, context, mounts, arguments
        self.environment: dict[str, str] = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **arguments}
        self.place, self.user = "/", "root"

    def build(self, file: Path, target: str) -> None:
        """Run all steps of a target."""
        for verb, rest in steps(file, target):
            print(f"{verb} {rest[:150]}", flush=True)
            getattr(self, f"_{verb.lower()}")(rest)

    def run(self, command: str, mounts: Mapping[Path, str] | None = None) -> str:
        """Run a shell command in the root, as its user and in its working directory; return its output.

        `mounts` maps folders to their paths inside; like /proc and /dev, they exist only for this command.
        """
        script = [f"mount -t proc proc {self.folder}/proc", f"mount --rbind /dev {self.folder}/dev"]
        for source, target in (mounts or {}).items():
            (self.folder / target.lstrip("/")).mkdir(parents=True, exist_ok=True)
            script.append(f"mount --bind {source} {self.folder}{target}")
        script.append(f'exec {shutil.which("chroot")} --userspec={self.user} {self.folder} /bin/sh -c "$0"')
        inside = ["unshare", "--mount", "sh", "-ec", "\n".join(script), f"cd {self.place} && {command}"]
        home = {"HOME": "/root" if self.user == "root" else f"/home/{self.user}"}
        done = subprocess.run(inside, env=self.environment | home, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}\n{(done.stdout + done.stderr)[-4000:]}"
        return done.stdout

    def _from(self, image: str) -> None:
        base = ["debootstrap", "--variant=minbase", BASES[image], str(self.folder)]
        subprocess.run(base, check=True, capture_output=True)
        self._trust()

    def _trust(self) -> None:
        """Let pip in the root trust the package registry that pip trusts on this machine. The registry's certificate
        may be known only on this machine.
        """
        if bundle := os.environ.get("PIP_CERT"):
            self.environment["PIP_CERT"] = str(shutil.copy(bundle, self.folder / "etc/pip.pem"))[
                len(str(self.folder)) :
            ]

    def _arg(self, rest: str) -> None:
        name, has_default, default = rest.partition("=")
        if has_default or name in self.arguments:  # an argument without a value is not set
            self.environment[name] = self.arguments.get(name, default)

    def _env(self, rest: str) -> None:
        self.environment |= dict(pair.split("=", 1) for pair in rest.split())

    def _workdir(self, rest: str) -> None:
        (self.folder / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        self.place = rest

    def _user(self, rest: str) -> None:
        self.user = rest

    def _copy(self, rest: str) -> None:
        *sources, target = rest.split()
        into = self.folder / self.place.lstrip("/") / target
        into.mkdir(parents=True, exist_ok=True)
        for source in sources:
            if source == ".":
                self._copy_context(into)
            else:
                shutil.copy(self.context / source, into)

    def _copy_context(self, into: Path) -> None:
        """Copy the files that `.dockerignore` allows: its patterns name the included files, one per line."""
        lines = (self.context / ".dockerignore").read_text().split()
        assert lines[0] == "*", "the file begins by ignoring everything"
        for pattern in (line.removeprefix("!") for line in lines if line.startswith("!")):
            found = [*self.context.glob(pattern)]
            assert found, f".dockerignore lets {pattern} through, and there is no such file"
            for path in found:
                target = into / path.relative_to(self.context)
                target.parent.mkdir(parents=True, exist_ok=True)
                if path.is_dir():
                    shutil.copytree(path, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
                else:
                    shutil.copy(path, target)

    def _run(self, rest: str) -> None:
        mounts = {self.mounts[name]: target for name, target in MOUNT.findall(rest)}
        self.run(MOUNT.sub("", rest), mounts)
