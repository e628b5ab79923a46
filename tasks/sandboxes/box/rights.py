"""Drops capabilities, and builds and installs the seccomp filter that rejects system calls of programs in a sandbox.

Five kinds of system calls are rejected:

* Calls that reach beyond the sandbox: namespaces, mounts, sockets other than socket pairs, tracing, kernel keys and
  BPF.
* Calls that change other processes of the same user: scheduling and limits.
* Calls for memory that does not count toward the memory limit: io_uring, System V IPC, anonymous shared memory, and
  pages given to a pipe or a socket.
* Calls that use up a resource that all sandboxes share: file descriptors sent through a socket.
* Calls that wait for the disks of the host.

System calls newer than the list in this module fail with ENOSYS.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import resource
import struct
from collections.abc import Sequence
from typing import Any

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
FILTER = 2  # SECCOMP_MODE_FILTER
CAPABILITIES = 64  # more than the number of existing capabilities
CAP_SYS_ADMIN = 21  # number of the capability to mount file systems and to create namespaces
CAPABILITY_VERSION = 0x20080522
NEW_NAMESPACES = 0x7E020000  # all flags of the system call clone that create namespaces
MAP_SHARED, MAP_ANONYMOUS, MAP_HUGETLB = 0x01, 0x20, 0x40000
# address family of Unix sockets, and the bit that is set in the types of connectionless sockets
AF_UNIX, DATAGRAMS = 1, 2
# range of network ioctls, which are rejected because a channel's socket belongs to the host's network namespace
NETWORK_IOCTLS = (0x8900, 0x8A00)
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000  # results of a filter
LOAD, EQUAL, AT_LEAST, ANY_BIT, GIVE = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of classic BPF
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3, NEWEST = 435, 450  # from number 424 on, x86-64 and aarch64 use the same numbers of system calls
X32 = 0x40000000  # bit that marks system calls of the x32 interface of x86-64
# number of a system call on x86-64 and on aarch64; None means that aarch64 has no such call
Numbers = tuple[int, int | None]
REFUSED: dict[str, Numbers] = {
    "shmget": (29, 194),
    "sendfile": (40, 71),
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "sendmsg": (46, 211),
    "bind": (49, 200),
    "listen": (50, 201),
    "semget": (64, 190),
    "msgget": (68, 186),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "uselib": (134, None),
    "personality": (135, 92),
    "ustat": (136, None),
    "sysfs": (139, None),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "vhangup": (153, 58),
    "modify_ldt": (154, None),
    "pivot_root": (155, 41),
    "_sysctl": (156, None),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "sync": (162, 81),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "nfsservctl": (180, 42),
    "io_setup": (206, 0),
    "lookup_dcookie": (212, 18),
    "remap_file_pages": (216, 234),
    "clock_settime": (227, 112),
    "mbind": (237, 235),
    "set_mempolicy": (238, 237),
    "get_mempolicy": (239, 236),
    "mq_open": (240, 180),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "ioprio_set": (251, 30),
    "inotify_init": (253, None),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "splice": (275, 76),
    "tee": (276, 77),
    "vmsplice": (278, 75),
    "move_pages": (279, 239),
    "accept4": (288, 242),
    "inotify_init1": (294, 26),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "clock_adjtime": (305, 266),
    "syncfs": (306, 267),
    "sendmmsg": (307, 269),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "sched_setattr": (314, 274),
    "memfd_create": (319, 279),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "pidfd_send_signal": (424, 424),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "landlock_create_ruleset": (444, 444),
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
    "set_mempolicy_home_node": (450, 450),
}
# index of an argument (.5 selects its upper half), comparison, value, expected result
Test = tuple[float, int, int, bool]
Rule = tuple[Numbers, tuple[Test, ...]]
REFUSED_IF: tuple[Rule, ...] = (  # system calls; each is rejected if all comparisons of its rule hold
    ((56, 220), ((0, ANY_BIT, NEW_NAMESPACES, True),)),  # clone
    ((53, 199), ((0, EQUAL, AF_UNIX, False),)),  # socketpair
    ((53, 199), ((1, ANY_BIT, DATAGRAMS, True),)),
    ((16, 29), ((1, AT_LEAST, NETWORK_IOCTLS[0], True), (1, AT_LEAST, NETWORK_IOCTLS[1], False))),  # ioctl
    ((9, 222), ((3, ANY_BIT, MAP_ANONYMOUS, True), (3, ANY_BIT, MAP_SHARED, True))),  # mmap
    ((9, 222), ((3, ANY_BIT, MAP_HUGETLB, True),)),
    ((141, 140), ((0, EQUAL, 0, False),)),  # setpriority for any process except the caller
    ((141, 140), ((1, EQUAL, 0, False),)),
    ((203, 122), ((0, EQUAL, 0, False),)),  # sched_setaffinity
    ((302, 261), ((0, EQUAL, 0, False),)),  # prlimit64
    ((302, 261), ((1, EQUAL, resource.RLIMIT_CORE, True), (2, EQUAL, 0, False))),
    ((302, 261), ((1, EQUAL, resource.RLIMIT_CORE, True), (2.5, EQUAL, 0, False))),
    ((160, 164), ((0, EQUAL, resource.RLIMIT_CORE, True),)),  # setrlimit
)
SAME_CORES: tuple[Rule, ...] = (((203, 122), ()),)  # sched_setaffinity

# PyDLL keeps the GIL during a call, so that a cloned process holds the GIL.
libc: Any = ctypes.PyDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def check(result: int, what: str) -> None:
    """Raise `OSError` if a call of the C library returned a negative result."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


@functools.cache
def build_filter(machine: str, more: Sequence[Rule] = ()) -> bytes:
    """Build the seccomp filter for a machine ("x86_64" or "aarch64"), as a classic BPF program.

    Each rule in `more` rejects one more system call. The filter is cached, and forked processes inherit the cache.
    """
    column = 0 if machine == "x86_64" else 1
    code = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, ARCHITECTURES[machine]), (GIVE, 0, 0, KILL), (LOAD, 0, 0, 0)]
    # If clone3 fails with ENOSYS, the C library calls clone instead.
    code += [(EQUAL, 0, 1, CLONE3), (GIVE, 0, 0, REFUSE | errno.ENOSYS)]
    code += [(AT_LEAST, 0, 1, X32), (GIVE, 0, 0, REFUSE | errno.EPERM)]
    code += [(AT_LEAST, 0, 1, NEWEST + 1), (GIVE, 0, 0, REFUSE | errno.ENOSYS)]
    rules: list[Rule] = [(numbers, ()) for numbers in REFUSED.values()]
    for numbers, tests in (*rules, *REFUSED_IF, *more):
        if (number := numbers[column]) is not None:
            code += _refuse(number, tests)
    code.append((GIVE, 0, 0, ALLOW))
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def _refuse(number: int, tests: tuple[Test, ...]) -> list[tuple[int, int, int, int]]:
    """Return BPF instructions that reject a system call if all tests on its arguments are true."""
    code = [(GIVE, 0, 0, REFUSE | errno.EPERM)]
    for argument, comparison, value, wanted in reversed(tests):
        out = len(code)
        jump = (comparison, 0, out, value) if wanted else (comparison, out, 0, value)
        code = [(LOAD, 0, 0, 16 + int(8 * argument)), jump, *code]
    code = [(EQUAL, 0, len(code), number), *code]
    return [*code, (LOAD, 0, 0, 0)] if tests else code


def forbid_privileges() -> None:
    """Drop all capabilities of this process except CAP_SYS_ADMIN; this process and its children can never gain
    others.
    """
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # the call fails for numbers above the last capability
    set_capabilities(1 << CAP_SYS_ADMIN)
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")


def set_capabilities(capabilities: int) -> None:
    """Drop all capabilities of this process except those in `capabilities`, a bit set of the first 32 capabilities."""
    check(libc.capset(*pack_capabilities(capabilities)), "capset")


def drop_capabilities() -> None:
    """Drop all capabilities of this process."""
    check(libc.capset(*NO_CAPABILITIES), "capset")


def pack_capabilities(capabilities: int) -> tuple[bytes, bytes]:
    """Return the arguments of capset for a bit set of the first 32 capabilities."""
    sets = struct.pack("=6I", capabilities, capabilities, 0, 0, 0, 0)  # effective, permitted, inheritable; upper halves
    return struct.pack("=Ii", CAPABILITY_VERSION, 0), sets


NO_CAPABILITIES = pack_capabilities(0)


class LoadedFilter:
    """A seccomp filter in the form that the kernel reads, which forked processes inherit."""

    def __init__(self, program: bytes) -> None:
        self._kept = ctypes.create_string_buffer(program, len(program))
        self._filter = _Program(len(program) // 8, ctypes.cast(self._kept, ctypes.c_void_p).value)
        self._address = ctypes.c_void_p(ctypes.addressof(self._filter))

    def install(self) -> None:
        """Install the filter for this process and its future children permanently."""
        check(libc.prctl(PR_SET_SECCOMP, FILTER, self._address, 0, 0), "seccomp")
