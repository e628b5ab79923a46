"""Simulates machines on this machine by network, mount and process namespaces, which a bridge with an S3 server
connects.

    hub 10.77.0.254: bridge, S3 (moto)            each machine: own network, HOME, /tmp, /var/tmp and /dev/shm;
     |            |            |                  the rest of the disk is read-only
    10.77.0.1   10.77.0.2    10.77.0.3

Machines communicate only over the bridge, and cannot reach any other network. All processes live in one process
namespace, whose first process is the hub's. The hub's process ends when its standard input is closed, which also
happens when the test dies. The kernel then ends all other processes and removes mounts, bridge and links. This needs
Linux, root and iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import psutil

REPOSITORY = Path(__file__).resolve().parents[2]
NETWORK = "10.77.0"
HUB = f"{NETWORK}.254"
BUCKET = "machines"
OWN = ("/tmp", "/var/tmp", "/home", "/dev/shm")
NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child")
START_SECONDS = 60.0
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18


def why_not() -> str:
    """Return why such machines cannot be created here; "" if they can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"machines in namespaces need `{tool}` (packages iproute2 and util-linux)"
    tried = subprocess.run(
        [*NAMESPACES, "ip", "link", "add", "bridge", "type", "bridge"], capture_output=True, text=True
    )
    return f"machines in namespaces need root: {tried.stderr.strip()}" if tried.returncode else ""


class Machines:
    """The hub and its machines, which all end with the block."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __enter__(self) -> Self:
        self._hub = _helper([*NAMESPACES], "hub")
        self.pid = _only_child(self._hub.pid)
        self.endpoint = _line(self._hub)["endpoint"]
        return self

    def __exit__(self, *_: object) -> None:
        assert self._hub.stdin is not None
        self._hub.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._hub.wait(10)
        self._hub.kill()
        self._hub.wait()

    def objects(self, prefix: str) -> dict[str, int]:
        """Return the keys below `prefix` in the bucket, and how often each was read."""
        assert self._hub.stdin is not None
        self._hub.stdin.write(f"{prefix}\n")
        self._hub.stdin.flush()
        return dict(_line(self._hub))

    def machine(self, name: str, *, own_processes: bool = False) -> Machine:
        """Connect a new machine. With `own_processes`, the machine has its own process namespace, so that Ray finds
        only its own nodes.
        """
        self.names.append(name)
        return Machine(self, name, f"{NETWORK}.{len(self.names)}", own_processes=own_processes)

    def share_disk(self) -> None:
        """Give all machines created from now on a common disk at /mnt."""
        inside = ["nsenter", "--target", str(self.pid), "--mount", "--"]
        subprocess.run([*inside, "mount", "-t", "tmpfs", "shared", "/mnt"], check=True)

    def ip(self, *arguments: str) -> None:
        """Run `ip` in the hub's network."""
        subprocess.run(["nsenter", "--target", str(self.pid), "--net", "ip", *arguments], check=True)


class Machine:
    """One virtual machine."""

    def __init__(self, machines: Machines, name: str, address: str, *, own_processes: bool = False) -> None:
        self.machines, self.name, self.address, self.home = machines, name, address, Path("/home", name)
        inside = ["nsenter", "--target", str(machines.pid), "--net", "--mount", "--pid", "unshare", "--net", "--mount"]
        inside += ["--pid", "--fork", "--mount-proc", "--kill-child"] if own_processes else []
        self._holder = _helper(inside, "machine", name)
        _line(self._holder)
        self.pid = _only_child(self._holder.pid)
        if own_processes:  # use the first process of the namespace, because the process that was found is `unshare`
            self.pid = _only_child(self.pid)
        machines.ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", str(self.pid))
        machines.ip("link", "set", name, "master", "bridge", "up")
        for command in (
            f"address add {address}/24 dev eth0",
            "link set lo up",
            "link set eth0 up",
            f"route add default via {HUB}",  # a route without traffic, from which Ray learns the machine's own address
        ):
            subprocess.run(["nsenter", "--target", str(self.pid), "--net", "ip", *command.split()], check=True)

    def start(self, command: Sequence[str], **environment: str) -> subprocess.Popen[bytes]:
        """Start a command in the machine's home; the output goes to `output.log` in this home."""
        kept = {key: os.environ[key] for key in ("PATH", "LANG") if key in os.environ}
        own = {
            "HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY / ".dev"), str(REPOSITORY)]),
            **self.credentials,
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }
        inside = ["nsenter", "--target", str(self.pid), "--net", "--mount", "--pid", "--"]
        shell = ["sh", "-c", 'cd "$HOME" && exec "$@" >> output.log 2>&1', "sh", *command]
        return subprocess.Popen([*inside, *shell], env=kept | own | environment, stdin=subprocess.DEVNULL)

    @property
    def credentials(self) -> dict[str, str]:
        """The variables that a command needs to reach the hub's S3 server."""
        keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        return keys | {"AWS_ENDPOINT_URL_S3": self.machines.endpoint}

    def know(self, hosts: Mapping[str, str]) -> None:
        """Make other machines known to the machine by name: `hosts` maps names to addresses."""
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in hosts.items())]
        file = self.home / "hosts"
        self.path(file).write_text("\n".join([*lines, ""]))
        inside = ["nsenter", "--target", str(self.pid), "--mount", "--"]
        subprocess.run([*inside, "mount", "--bind", str(file), "/etc/hosts"], check=True)

    def path(self, inside: str | Path) -> Path:
        """Return the path under which the test can read a file of the machine."""
        return Path(f"/proc/{self.pid}/root", str(inside).lstrip("/"))

    def output(self, lines: int = 60) -> str:
        """Return the end of the output of the machine's commands."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join(self.path(self.home / "output.log").read_text(errors="replace").splitlines()[-lines:])
        return ""

    def processes(self) -> list[psutil.Process]:
        """List the machine's processes without the process that holds the namespace."""
        try:
            own = os.readlink(f"/proc/{self.pid}/ns/net")
        except FileNotFoundError:  # the machine was switched off
            return []
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError, psutil.Error):
                if process.pid != self.pid and os.readlink(f"/proc/{process.pid}/ns/net") == own:
                    found.append(process)
        return found

    def lose_power(self) -> None:
        """Switch the machine off: first its network, so that no other machine notices, then its processes and disk."""
        self.machines.ip("link", "delete", self.name)
        limit = time.monotonic() + START_SECONDS
        while (living := self.processes()) and time.monotonic() < limit:
            for process in living:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        assert not living, living
        assert self._holder.stdin is not None
        self._holder.stdin.close()
        self._holder.wait(START_SECONDS)


def _helper(prefix: Sequence[str], *arguments: str) -> subprocess.Popen[str]:
    command = [*prefix, sys.executable, "-m", "tests.support.machines", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY / ".dev"), str(REPOSITORY)])}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd="/")


def _line(helper: subprocess.Popen[str]) -> Any:
    assert helper.stdout is not None
    line = helper.stdout.readline()
    assert line, f"{helper.args} ended"
    return json.loads(line)


def _only_child(pid: int) -> int:
    """Return the process that unshare or nsenter forked into the process namespace."""
    limit = time.monotonic() + START_SECONDS
    while not (found := psutil.Process(pid).children()) and time.monotonic() < limit:
        time.sleep(0.01)
    return int(found[0].pid)


# --- programs inside the namespaces -------------------------------------------------------------------------


def hub() -> None:
    """Run a bridge and an S3 server; answer each line with the keys below that prefix, until the input ends."""
    import logging

    import s3fs

    from tests.support.s3_server import s3_server

    for command in ("link add bridge type bridge", f"address add {HUB}/24 dev bridge", "link set bridge up"):
        subprocess.run(["ip", *command.split()], check=True)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    reads: Counter[str] = Counter()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with s3_server(BUCKET, HUB, reads) as endpoint:
        files = s3fs.S3FileSystem(key="test", secret="test", endpoint_url=endpoint, use_listings_cache=False)
        _say({"endpoint": endpoint})
        for line in sys.stdin:
            below = f"{line.strip()}/"  # `find` may name the folder itself while its first object is written
            keys = (key.partition("/")[2] for key in files.find(f"{BUCKET}/{below}"))
            _say({key: reads[key] for key in keys if key.startswith(below)})


def machine(name: str) -> None:
    """Mount a separate disk, then wait for the end."""
    own_disk([REPOSITORY, Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()])
    Path("/home", name).mkdir()
    _say({})
    sys.stdin.read()


def own_disk(needed: Sequence[Path]) -> None:
    """Mount empty folders over `OWN` and make the rest read-only; Python's files stay readable."""
    opened = {path: os.open(path, os.O_PATH) for path in needed}
    _mount("none", "/", flags=MS_REC | MS_PRIVATE)
    for folder in OWN:
        _mount("tmpfs", folder, kind="tmpfs")
    for path, descriptor in opened.items():
        if not path.exists():
            path.mkdir(parents=True)
            _mount(f"/proc/self/fd/{descriptor}", str(path), flags=MS_BIND | MS_REC)
            _mount("none", str(path), flags=MS_REMOUNT | MS_BIND | MS_RDONLY)
    _mount("none", "/", flags=MS_REMOUNT | MS_BIND | MS_RDONLY)


def _mount(source: str, target: str, *, kind: str | None = None, flags: int = 0) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode() if kind else None, ctypes.c_ulong(flags), None):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def _say(what: Mapping[str, Any]) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    {"hub": hub, "machine": machine}[sys.argv[1]](*sys.argv[2:])
