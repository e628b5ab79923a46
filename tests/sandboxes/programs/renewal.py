"""Programs that end by themselves with exit code 0, and try to leave something for the next program of a renewed
sandbox.
"""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

SETTINGS = """
import resource
os.umask(0o777); os.chdir('/usr'); os.nice(19)
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
for which in range(16):
    for pid in (0, 1):
        try: resource.prlimit(pid, which, (0, 0)) if which != resource.RLIMIT_CPU else None
        except (OSError, ValueError): pass
fails(os.setpriority, 0, 1, 19); fails(os.sched_setaffinity, 1, {0})
fails(os.sched_setscheduler, 1, os.SCHED_BATCH, os.sched_param(0))
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))
"""

LEAVING = (
    Hostile(
        "files",
        "for folder in ('/work', '/tmp', '/dev/shm'):\n    open(folder + '/left', 'w').write('x')\n"
        "os.makedirs('a/b/.c'); os.mkfifo('pipe'); os.symlink('/proc/1', 'link'); os.chmod('a', 0)",
    ),
    Hostile(
        "open deleted files",
        "for n in range(50):\n    f = os.open(f'f{n}', os.O_RDWR | os.O_CREAT); os.write(f, b'x' * 9999)\n"
        "    os.unlink(f'f{n}')\nforks(3, lambda: time.sleep(600))",
    ),
    Hostile("memory file", "fails(os.memfd_create, 'left')\nforks(2, lambda: time.sleep(600))"),
    Hostile(
        "mapped files in shared memory",
        "f = open('/dev/shm/map', 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)\nm.write(b'x' * 4096)\n"
        "forks(3, lambda: (m.write_byte(1) if m.tell() < 4096 else None, time.sleep(600)))",
    ),
    Hostile(
        "detached child shortly before the end",
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork(): os._exit(0)\n    signal.signal(15, signal.SIG_IGN)\n"
        "    time.sleep(600)\ntime.sleep(0.01); os._exit(0)",
    ),
    Hostile(
        "children that fork at the end",
        "def storm():\n    while True:\n        try:\n            if os.fork() == 0: os.setsid()\n"
        "        except OSError: pass\nforks(2, storm)\ntime.sleep(0.005); os._exit(0)",
    ),
    Hostile("children of the keeper at the end", "call(56, 0x8000, 0, 0, 0, 0) or time.sleep(600)", machine="x86_64"),
    Hostile("silent children at the end", "call(56, 0, 0, 0, 0, 0) or time.sleep(600)", machine="x86_64"),
    Hostile("stopped children at the end", "forks(3, lambda: os.kill(os.getpid(), signal.SIGSTOP)); time.sleep(0.01)"),
    Hostile(
        "traced child",
        "forks(1, lambda: (call(101, 0, 0, 0, 0), time.sleep(600)))\nrefused('ptrace', 101, 16, 1, 0, 0)",
        machine="x86_64",
    ),
    Hostile("many process ids", "for _ in range(300):\n    if os.fork() == 0: os._exit(0)\n    os.wait()"),
    Hostile(
        "the newest process id", "f = os.open('/proc/sys/kernel/ns_last_pid', os.O_WRONLY); fails(os.write, f, b'999')"
    ),
    Hostile("name of the process", "libc.prctl(15, b'LEFT-' + b'OVER-NAME')\ntime.sleep(0.1)"),
    Hostile("exit code", "sys.exit(93)"),
    Hostile("processor time", "until = time.process_time() + 0.1\nwhile time.process_time() < until: pass"),
    Hostile("output", "print('LEFT-' + 'OVER-OUTPUT' * 3000)\nprint('LEFT-' + 'OVER-ERROR' * 3000, file=sys.stderr)"),
    Hostile("settings of processes", SETTINGS),
    Hostile(
        "timers",
        "signal.setitimer(signal.ITIMER_REAL, 500, 1); signal.setitimer(signal.ITIMER_PROF, 500)\n"
        "for clock in (0, 1, -14, -10): call(222, clock, 0, bytes(8)); call(283, clock, 0)\nsignal.alarm(500)",
        machine="x86_64",
    ),
    Hostile(
        "signals for the keeper",
        "for number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\n"
        "    libc.sigqueue(1, number, 7)",
    ),
    Hostile(
        "signals by files",
        "import fcntl\na, b = socket.socketpair()\nfor number in (0, 9, 17, 34):\n"
        "    fcntl.fcntl(a, fcntl.F_SETOWN, 1); fcntl.fcntl(a, 10, number)\n"
        "    fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC); b.send(b'x')",
    ),
    Hostile(
        "System V objects",
        "refused('shmget', 29, 77, 4096, 0o1666)\nrefused('semget', 64, 77, 1, 0o1666)\n"
        "refused('msgget', 68, 77, 0o1666)",
        machine="x86_64",
    ),
    Hostile("POSIX queues", "refused('mq_open', 240, b'/left', 0o102, 0o666, 0)", machine="x86_64"),
    Hostile(
        "keys",
        "for ring in (-1, -2, -3, -4, -5): refused('add_key', 248, b'user', b'LEFT', b'x', 1, ring)\n"
        "for command in range(32): refused('keyctl', 250, command, -3, 0, 0, 0)\n"
        "refused('request_key', 249, b'user', b'LEFT', 0, -4)",
        machine="x86_64",
    ),
    Hostile(
        "abstract sockets",
        "for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):\n    for s in socket.socketpair(1, kind):\n"
        "        fails(s.bind, '\\0left'); fails(s.bind, ''); fails(s.listen)",
    ),
    Hostile(
        "settings of the kernel",
        "for folder, _, names in os.walk('/proc/sys'):\n    for name in names:\n"
        "        try: f = os.open(f'{folder}/{name}', os.O_RDWR | os.O_NONBLOCK)\n        except OSError: continue\n"
        "        try:\n            data = os.read(f, 4096)\n"
        "            if os.write(f, data or b'1'): escaped(folder, name)\n"
        "        except OSError: pass\n        os.close(f)",
    ),
    Hostile("host name", "fails(socket.sethostname, 'left')\nrefused('domain', 171, b'left', 4)", machine="x86_64"),
    Hostile(
        "watched files",
        "refused('inotify', 253)\nrefused('inotify', 294, 0)\nrefused('fanotify', 300, 0, 0)",
        machine="x86_64",
    ),
    Hostile(
        "rings and faults",
        "refused('io_uring', 425, 8, bytes(120))\nrefused('userfaultfd', 323, 0)\nopens('/dev/userfaultfd')",
        machine="x86_64",
    ),
    Hostile(
        "locks and leases",
        "import fcntl\nf = open('/usr/bin/env')\nfcntl.flock(f, fcntl.LOCK_SH)\n"
        "try: fcntl.fcntl(f, 1024, 0)\nexcept OSError: pass\nforks(2, lambda: time.sleep(600))",
    ),
    Hostile(
        "file systems in use",
        "f = os.open('/proc/1', os.O_PATH); g = os.open('/work', os.O_PATH)\n"
        "os.makedirs('d'); os.chdir('d')\nforks(2, lambda: time.sleep(600))",
    ),
    Hostile(
        "descriptors in flight",
        "a, b = socket.socketpair()\nfails(socket.send_fds, a, [b'x'], [0, 1, 2])\n"
        "refused('sendmsg', 46, a.fileno(), bytes(56), 0)",
        machine="x86_64",
    ),
    Hostile(
        "state of the interpreter",
        "import builtins, json\nbuiltins.left = json.left = os.left = 1\n"
        "os.environ['LEFT'] = '1'\nsys.path.insert(0, '/work')\nimport random\nrandom.seed(7)",
    ),
)
