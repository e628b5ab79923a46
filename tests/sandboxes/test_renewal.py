"""Tests the renewal of sandboxes: nothing of an earlier program remains in a renewed sandbox. A sandbox whose state is
uncertain is not renewed.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from rollflow.storage.errors import ConfigError
from rollflow.tasks.sandboxes import bubblewrap
from rollflow.tasks.sandboxes.base import ExecResult, Program, ProgramEnd, SandboxFailed
from rollflow.tasks.sandboxes.bubblewrap import BubblewrapSandboxes
from tests.sandboxes.box import CONFIG, KINDS, LONG, PYTHON, Box, build_as_user
from tests.sandboxes.programs.base import PRELUDE, Hostile
from tests.sandboxes.programs.renewal import LEAVING
from tests.support.sandbox_processes import list_boxes

MARK = "LEFT-OVER-"
# prints all facts about its sandbox that a program can learn and that are the same in each new sandbox
PROBE = """
import json, os, random, re, resource, signal, sys
def read(path):
    try:
        with open(path, errors='replace') as file: return file.read()
    except OSError as error: return str(error)
mark = re.compile(b'LEFT[-]OVER[-]')
held = []
for line in open('/proc/self/maps'):
    low, high = (int(x, 16) for x in line.split()[0].split('-'))
    if 'rw' not in line or high - low > 1 << 28: continue
    try:
        with open('/proc/self/mem', 'rb', 0) as file:
            file.seek(low); held += mark.findall(file.read(high - low))
    except OSError: pass
kept = ('Umask', 'TracerPid', 'NSpid', 'Threads', 'SigQ', 'SigPnd', 'ShdPnd', 'SigBlk', 'SigIgn', 'SigCgt',
    'CapInh', 'CapPrm', 'CapEff', 'CapBnd', 'CapAmb', 'NoNewPrivs', 'Seccomp', 'Cpus_allowed', 'Name', 'Uid', 'Groups')
lines = {pid: read(f'/proc/{pid}/status').splitlines() for pid in ('1', 'self')}
status = {pid: [l for l in lines[pid] if l.split(':')[0] in kept] for pid in lines}
stat = read('/proc/1/stat').rpartition(')')[2].split()
print(json.dumps({
    'processes': sorted(n for n in os.listdir('/proc') if n.isdigit()),
    'ids': [os.getpid(), os.getppid(), os.getpgrp(), os.getsid(0), os.getuid(), os.getgid(), os.getgroups()],
    'newest process': read('/proc/sys/kernel/ns_last_pid'),
    'folder': [os.listdir(f) for f in ('/work', '/tmp', '/dev/shm')],
    'space': [(s := os.statvfs('/work')).f_bfree, s.f_ffree],
    'used by children': [stat[n] for n in (8, 10, 13, 14)],
    'status': status,
    'limits': [read('/proc/self/limits'), read('/proc/1/limits')],
    'priorities': [os.getpriority(0, pid) for pid in (0, 1)],
    'cores': [sorted(os.sched_getaffinity(pid)) for pid in (0, 1)],
    'objects': [read('/proc/sysvipc/' + n) for n in ('shm', 'msg', 'sem')],
    'names of sockets': [l for l in read('/proc/net/unix').splitlines() if '@' in l or '/' in l],
    'keys': [l for l in read('/proc/keys').splitlines() if 'LEFT' in l],
    'machine': list(os.uname())[:2],
    'mounts': [l.split()[3:] for l in read('/proc/self/mountinfo').splitlines()],
    'variables': dict(os.environ), 'path': sys.path, 'place': os.getcwd(), 'files': sorted(os.listdir('/proc/self/fd')),
    'timers': [signal.getitimer(n) for n in range(3)], 'used': resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    'random': random.random(), 'builtins': [hasattr(m, 'left') for m in (os, json, __builtins__)], 'held': len(held),
}))
"""


@pytest.fixture(scope="module", params=KINDS)
def box(request: pytest.FixtureRequest) -> Iterator[Box]:
    """Start sandboxes with one spare sandbox as this user and, if this user is root, as an ordinary user, too."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "ordinary user":
            if os.geteuid() != 0 or not shutil.which("setpriv") or not os.path.exists(f"/usr/bin/{PYTHON}"):
                pytest.skip(f"not root, or no setpriv, or no /usr/bin/{PYTHON}")
            patch.setattr(bubblewrap, "build_command", build_as_user(bubblewrap.build_command))
        created = Box(BubblewrapSandboxes(CONFIG.model_copy(update={"spares": 1})))
        try:
            created.do(created.sandboxes.start())
        except ConfigError as error:
            created.close()
            pytest.skip(str(error))
        yield created
        created.close()


def count_created(box: Box) -> int:
    """Return the number of sandboxes that were created so far; a renewal creates none."""
    return box.sandboxes._numbers


async def settle(box: Box) -> bool:
    """Wait until all spare sandboxes are created or renewed; return False if one of them failed."""
    try:
        for spare in list(box.sandboxes._spares):
            await (spare if isinstance(spare, asyncio.Task) else spare.wait_renewed())
    except SandboxFailed:
        return False
    return True


async def probe(box: Box) -> dict[str, Any]:
    """Return what a program finds in the next sandbox."""
    found = await box.sandboxes.run(Program(code=PROBE, timeout=LONG))
    assert found.succeeded, found
    return dict(json.loads(found.stdout))


async def probe_new(box: Box) -> dict[str, Any]:
    """Return what a program finds in a new sandbox."""
    sandbox = await box.sandboxes.create()
    found = await sandbox.exec(Program(code=PROBE, timeout=LONG))
    await sandbox.close()
    return dict(json.loads(found.stdout))


async def find_renewed(box: Box) -> tuple[int, list[psutil.Process]]:
    """Run programs until a sandbox was renewed after one of them. Return the number of sandboxes created so far, and
    the processes of the renewed sandbox. A slow host, or a process of the host that uses the sandbox's folder, can
    prevent a renewal.
    """
    for _ in range(5):
        await probe(box)
        if await settle(box):
            return count_created(box), await find_chain()
    raise AssertionError("no sandbox was renewed after any of five programs")


async def find_chain() -> list[psutil.Process]:
    """Return the keeper, the holder, process 1 of the programs' namespace and the waiting program of the only sandbox,
    as soon as there is only one.
    """
    async with asyncio.timeout(LONG):
        while True:
            box = list_boxes()[-1]
            numbers = {one: list_ids(one) for one in box.children(recursive=True)}
            depth = len(list_ids(box)) + 3  # namespaces of the box, of the sandbox and of its programs
            chain = [one for one, ids in numbers.items() if len(ids) in (depth - 1, depth)]
            chain.sort(key=lambda one: (len(numbers[one]), numbers[one][-1]))
            if [(len(numbers[one]) - depth, numbers[one][-1]) for one in chain] == [(-1, 1), (-1, 2), (0, 1), (0, 2)]:
                return chain
            await asyncio.sleep(0.02)


def list_ids(process: psutil.Process) -> list[int]:
    """Return the ids of a process, one for each process namespace that contains the process."""
    try:
        status = Path(f"/proc/{process.pid}/status").read_text()
    except OSError:
        return []
    return [int(number) for line in status.splitlines() if line.startswith("NSpid:") for number in line.split()[1:]]


def describe(process: psutil.Process) -> list[Any]:
    """Return what a program could have changed in a process."""
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    names = ("Umask", "TracerPid", "SigPnd", "ShdPnd", "SigBlk", "SigIgn", "SigCgt", "Cap", "Cpus_allowed", "Threads")
    kept = [line for line in status if line.startswith(names)]
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    timers = Path(f"/proc/{process.pid}/timers").read_text()
    return [kept, limits, timers, process.nice(), process.ionice(), process.num_fds(), process.cwd()]


def call(command: list[str]) -> int:
    """Run a command of the host, and return its exit code."""
    return subprocess.run(command, capture_output=True, check=False).returncode


async def leave(box: Box, hostile: Hostile, command: bool) -> ExecResult:
    """Run a program that leaves something behind, as Python source in a forked interpreter or as a command."""
    given: dict[str, Any] = {"stdin": MARK.encode() * 999, "env": {"LEFT": MARK}, "arguments": [MARK] * 9}
    code = f"# {MARK}\n{hostile.source}"
    if not command:
        return await box.sandboxes.run(Program(code=code, timeout=LONG, **given))
    program = Program(command=[PYTHON, "main.py"], timeout=LONG, **given)
    return await box.sandboxes.run(program, {"main.py": code.encode(), "more/data": MARK.encode()})


HERE = [hostile for hostile in LEAVING if hostile.machine in ("", os.uname().machine)]
CASES = [
    *(pytest.param(KINDS[0], hostile, False, id=f"{KINDS[0]}, {hostile.name}") for hostile in HERE),
    *(pytest.param(KINDS[0], hostile, True, id=f"command, {hostile.name}") for hostile in HERE if hostile.varies),
    *(pytest.param(KINDS[1], hostile, False, id=f"{KINDS[1]}, {hostile.name}") for hostile in HERE if hostile.varies),
]


@pytest.mark.parametrize(("box", "hostile", "command"), CASES, indirect=["box"])
def test_program_leaves_nothing_in_a_renewed_sandbox(box: Box, hostile: Hostile, command: bool) -> None:
    async def work() -> None:
        new = await probe_new(box)
        count, (keeper, holder, *_) = await find_renewed(box)
        before = describe(keeper), describe(holder)
        found = await leave(box, hostile, command)
        assert (found.end, b"ESCAPED" in found.stdout + found.stderr) == (ProgramEnd.EXITED, False), found
        assert found.return_code in (0, 93), found
        await settle(box)
        assert (describe(keeper), describe(holder)) == before
        assert await probe(box) == new
        assert count_created(box) == count
        assert (await find_chain())[:2] == [keeper, holder]

    box.do(work())


ENDS = {
    "signal": Program(code="import os; os.kill(os.getpid(), 15)", timeout=LONG),
    "deadline": Program(code="import time; time.sleep(600)", timeout=0.2),
    "memory": Program(code="kept = []\nwhile True: kept.append(bytearray(1 << 20) or kept)", timeout=LONG),
    "output": Program(code="while True: print('x' * 9999)", timeout=LONG),
    "processes": Program(code=PRELUDE + "forks(40, lambda: time.sleep(600)); time.sleep(600)", timeout=2.0),
    "kept children": Program(code="print(1)", keep_children=True, timeout=LONG),
}


@pytest.mark.parametrize("end", ENDS)
def test_sandbox_is_renewed_only_after_a_clean_end(box: Box, end: str) -> None:
    async def work() -> None:
        new = await probe(box)
        count = count_created(box)
        found = await box.sandboxes.run(ENDS[end])
        was_clean = found.end is ProgramEnd.EXITED and found.return_code >= 0 and not ENDS[end].keep_children
        assert await probe(box) == new
        assert count_created(box) == count + (not was_clean)
        assert not was_clean or end in ("memory", "processes")  # the kernel may refuse both before they are measured

    box.do(work())


@pytest.mark.parametrize("end", ENDS)
def test_sandbox_is_never_renewed_after_an_unclean_end(box: Box, end: str) -> None:
    async def work() -> None:
        sandbox = await box.sandboxes.create()
        found = await sandbox.exec(ENDS[end], renew=True)
        if found.end is ProgramEnd.EXITED and found.return_code >= 0 and not ENDS[end].keep_children:
            await sandbox.wait_renewed()
            assert (await sandbox.exec(Program(code=PROBE, timeout=LONG))).succeeded
        else:
            with pytest.raises(SandboxFailed):
                await sandbox.wait_renewed()
        await sandbox.close()

    box.do(work())


@pytest.mark.parametrize("killed", [0, 1, 2], ids=["keeper", "holder", "process 1"])
def test_run_after_a_killed_sandbox_process_gets_a_new_sandbox(box: Box, killed: int) -> None:
    async def work() -> None:
        new = await probe(box)
        count, chain = await find_renewed(box)
        running = asyncio.create_task(box.sandboxes.run(Program(code="import time; time.sleep(1)", timeout=LONG)))
        await asyncio.sleep(0.2)
        chain[killed].kill()
        results = await asyncio.gather(running, return_exceptions=True)
        assert type(results[0]).__name__ == "SandboxLost"
        psutil.wait_procs(chain, timeout=LONG)
        assert not any(one.is_running() for one in chain)
        assert await probe(box) == new
        assert count_created(box) == count + 1

    box.do(work())


def test_sandbox_whose_folder_is_in_use_is_not_renewed(box: Box) -> None:
    async def work() -> None:
        count, (keeper, *_) = await find_renewed(box)
        try:
            fd = os.open(f"/proc/{keeper.pid}/root/work", os.O_RDONLY)
        except PermissionError:
            pytest.skip("this user may not open the folder of a sandbox")
        try:
            assert (await box.sandboxes.run(Program(code="print(1)", timeout=LONG))).succeeded
            await settle(box)
        finally:
            os.close(fd)
        await probe(box)
        assert count_created(box) == count + 1

    box.do(work())


def test_sandbox_is_not_renewed_if_an_ipc_object_exists(box: Box) -> None:
    async def work() -> None:
        count, (keeper, *_) = await find_renewed(box)
        space = ["nsenter", f"--ipc=/proc/{keeper.ppid()}/ns/ipc"]
        if call([*space, "ipcmk", "-Q"]) != 0:
            pytest.skip("this user may not enter the namespaces of a sandbox")
        try:
            assert (await box.sandboxes.run(Program(code="print(1)", timeout=LONG))).succeeded
            await settle(box)
        finally:
            assert call([*space, "ipcrm", "--all"]) == 0
        await probe(box)
        assert count_created(box) == count + 1

    box.do(work())


def test_concurrent_programs_share_no_sandbox(box: Box) -> None:
    """The test runs more programs than there are spare sandboxes. Some programs fail, and some are cancelled."""
    code = "import os, time\nassert os.listdir('.') == []\nopen('left', 'w').close(); time.sleep(0.02)\nprint(%d)"

    async def run(number: int) -> None:
        if number % 7 == 3:
            found = await box.sandboxes.run(Program(code="import os; os.abort()", timeout=LONG))
            assert found.return_code == -6
        elif number % 7 == 5:
            running = asyncio.create_task(box.sandboxes.run(Program(code="while True: pass", timeout=LONG)))
            await asyncio.sleep(0.01 * (number % 4))
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        else:
            found = await box.sandboxes.run(Program(code=code % number, timeout=LONG))
            assert (found.stdout, found.stderr) == (b"%d\n" % number, b"")

    async def call(first: int) -> None:
        for number in range(first, first + 14):
            await run(number)

    async def work() -> None:
        await asyncio.gather(*(call(14 * n) for n in range(4)))
        await probe(box)

    box.do(work())
