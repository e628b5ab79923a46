"""Programs that make system calls that a program written by a model does not need."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

GROUPS = {  # groups of system calls with their numbers on x86-64
    "tracing": "ptrace 101 process_vm_readv 310 process_vm_writev 311 kcmp 312 pidfd_getfd 438 pidfd_send_signal 424",
    "settings": "syslog 103 acct 163 swapon 167 swapoff 168 reboot 169 sethostname 170 setdomainname 171 quotactl 179",
    "modules": "init_module 175 delete_module 176 finit_module 313 kexec_load 246 kexec_file_load 320 bpf 321",
    "keys": "add_key 248 request_key 249 keyctl 250",
    "devices": "iopl 172 ioperm 173 modify_ldt 154 personality 135 vhangup 153 uselib 134 ustat 136 sysfs 139",
    "mounts": "mount 165 umount2 166 pivot_root 155 chroot 161 open_tree 428 move_mount 429 fsopen 430 fsconfig 431 "
    "fsmount 432 fspick 433 mount_setattr 442 name_to_handle_at 303 open_by_handle_at 304 fanotify_init 300",
    "namespaces": "unshare 272 setns 308",
    "rings": "io_uring_setup 425 io_uring_enter 426 io_uring_register 427 io_setup 206 perf_event_open 298",
    "pages": "userfaultfd 323 memfd_create 319 memfd_secret 447 vmsplice 278 splice 275 tee 276 sendfile 40 "
    "mbind 237 migrate_pages 256 "
    "move_pages 279 "
    "process_madvise 440 process_mrelease 448 mq_open 240",
    "clocks": "adjtimex 159 clock_adjtime 305 clock_settime 227 settimeofday 164",
    "scheduling": "sched_setattr 314 sched_setscheduler 144 sched_setparam 142 ioprio_set 251 lookup_dcookie 212",
    "news": "cachestat 451 map_shadow_stack 453 statmount 457 listmount 458 setxattrat 463 open_tree_attr 467 new 600",
}


def _calls(text: str) -> str:
    words = text.split()
    return "\n".join(f"refused({name!r}, {number})" for name, number in zip(words[::2], words[1::2], strict=True))


KERNEL = (
    *(Hostile(f"system calls for {name}", _calls(text), machine="x86_64") for name, text in GROUPS.items()),
    Hostile(
        "new namespaces",
        "for bit in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):\n"
        "    for high in (0, 1 << 40):\n        found = call(56, high | bit | 17, 0, 0, 0, 0)\n"
        "        if found == 0: os._exit(0)\n        if found > 0: escaped(hex(bit))",
        machine="x86_64",
    ),
    Hostile(
        "system calls of 32 bits",
        "m = mmap.mmap(-1, 4096, flags=0x22, prot=7)\n"
        "m.write(b'\\xb8\\x14\\x00\\x00\\x00\\xcd\\x80\\xc3')\n"
        "at = ctypes.addressof(ctypes.c_char.from_buffer(m))\n"
        "escaped('getpid by int 0x80', ctypes.CFUNCTYPE(ctypes.c_int)(at)())",
        machine="x86_64",
    ),
    Hostile(
        "system calls of x32",
        "for number in (0, 39, 41, 56, 165, 512, 520, 534): refused('x32', 0x40000000 + number)",
        machine="x86_64",
    ),
    Hostile(
        "keeper by ptrace",
        "for request in (0, 16, 0x4206): refused('ptrace', 101, request, 1, 0, 0)\n"
        "refused('process_vm_readv', 310, 1, bytes(16), 1, bytes(16), 1, 0)\n"
        "fd = os.pidfd_open(1)\nrefused('pidfd_getfd', 438, fd, 0, 0)\nrefused('setns', 308, fd, 0x20000000)\n"
        "refused('pidfd_send_signal', 424, fd, 9, 0, 0)",
        machine="x86_64",
    ),
    Hostile(
        "capabilities",
        "status = open('/proc/self/status').read()\n"
        "for name in ('CapPrm', 'CapEff', 'CapBnd', 'CapInh', 'CapAmb'):\n"
        "    if int(status.split(name + ':')[1].split()[0], 16): escaped(name)\n"
        "for line in ('NoNewPrivs:\\t1', 'Seccomp:\\t2'):\n    if line not in status: escaped(line)",
    ),
    Hostile("filter of its own", "libc.prctl(38, 0, 0, 0, 0)\nif libc.prctl(22, 1, 0, 0, 0) == 0: os.getpid()"),
    Hostile(
        "core files",
        "import resource\nfails(resource.setrlimit, resource.RLIMIT_CORE, (0, 0))\n"
        "if os.fork() == 0: os.abort()\nif os.WCOREDUMP(os.wait()[1]): escaped('core file')",
    ),
    Hostile("open files of the box", "for n in range(3, 256): fails(os.fstat, n)"),
)
