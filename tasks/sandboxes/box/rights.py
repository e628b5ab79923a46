"""Takes rights away from a program: capabilities, and system calls that a program does not need.

System calls that could reach beyond the sandbox, or that hold memory that nobody counts, are refused: namespaces,
mounts, sockets (a pair of connected sockets is allowed), tracing, kernel keys, BPF, io_uring, shared memory without a
file. A system call that is newer than this list does not exist for a program.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Any

PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 4, 22, 24, 38
FILTER = 2  # SECCOMP_MODE_FILTER
CAPABILITIES = 64  # more than there are
CAPABILITY_VERSION = 0x20080522
NEW_NAMESPACES = 0x7E020000  # the flags of clone that create a namespace
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000  # results of a filter
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
CLONE = {"x86_64": 56, "aarch64": 220}
CLONE3, NEWEST = 435, 450  # from 424 on, both architectures number their system calls equally
X32 = 0x40000000  # system calls of a second interface of x86-64
REFUSED: dict[str, tuple[int, int]] = {  # name -> number on x86-64, on aarch64
    "socket": (41, 198),
    "shmget": (29, 194),
    "ptrace": (101, 117),
    "syslog": (103, 116),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "adjtimex": (159, 171),
    "chroot": (161, 51),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "clock_settime": (227, 112),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "migrate_pages": (256, 238),
    "unshare": (272, 97),
    "move_pages": (279, 239),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
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
    "memfd_secret": (447, 447),
    "process_mrelease": (448, 448),
}

libc: Any = ctypes.PyDLL(None, use_errno=True)  # PyDLL keeps the GIL, so that a cloned process has the GIL


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def check(result: int, what: str) -> None:
    """Raise the error of a call of the C library."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def build_filter(machine: str) -> bytes:
    """Build the filter of system calls for a machine, "x86_64" or "aarch64", as a program of classic BPF."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    column = 0 if machine == "x86_64" else 1
    code = [(load, 0, 0, 4), (equal, 1, 0, ARCHITECTURES[machine]), (give, 0, 0, KILL), (load, 0, 0, 0)]
    for numbers in REFUSED.values():
        code += [(equal, 0, 1, numbers[column]), (give, 0, 0, REFUSE | errno.EPERM)]
    code += [(equal, 0, 1, CLONE3), (give, 0, 0, REFUSE | errno.ENOSYS)]  # the C library then calls clone
    code += [(at_least, 0, 1, X32), (give, 0, 0, REFUSE | errno.EPERM)]
    code += [(at_least, 0, 1, NEWEST + 1), (give, 0, 0, REFUSE | errno.ENOSYS)]
    code += [(equal, 0, 3, CLONE[machine]), (load, 0, 0, 16), (any_bit, 0, 1, NEW_NAMESPACES)]
    code += [(give, 0, 0, REFUSE | errno.EPERM), (give, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in code)


def give_up_rights(program: bytes) -> None:
    """Give up all capabilities, and install a filter of system calls; both last for this process and its children."""
    for capability in range(CAPABILITIES):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails for numbers beyond the last capability
    header = struct.pack("=Ii", CAPABILITY_VERSION, 0)
    check(libc.capset(header, bytes(24)), "capset")
    check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    kept = ctypes.create_string_buffer(program, len(program))
    filtered = _Program(len(program) // 8, ctypes.cast(kept, ctypes.c_void_p).value)
    check(libc.prctl(PR_SET_SECCOMP, FILTER, ctypes.byref(filtered), 0, 0), "seccomp")
