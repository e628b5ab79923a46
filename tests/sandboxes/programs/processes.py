"""Programs that try to outlive their deadline, to start too many processes, or to reach other processes."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

SLEEP = "lambda: time.sleep(600)"

PROCESSES = (
    Hostile(
        "forks",
        "count = 1\ntry:\n    while True:\n        if os.fork() == 0: time.sleep(600)\n        count += 1\n"
        "except OSError: pass\nif count > 20: escaped(count)",
        1.0,
    ),
    Hostile("forks that fork", "while True:\n    try: os.fork()\n    except OSError: pass", 0.7),
    Hostile("vfork", "count = 0\nwhile call(58) >= 0 and count < 100: count += 1", 0.7, machine="x86_64"),
    Hostile(
        "threads",
        "count = 1\ntry:\n    while True:\n"
        "        threading.Thread(target=time.sleep, args=(600,)).start(); count += 1\n"
        "except RuntimeError: pass\nif count > 20: escaped(count)",
        0.7,
    ),
    Hostile("clone3", "refused('clone3', 435, bytes(88), 88)"),
    Hostile(
        "commands",
        "import subprocess\nstarted = []\ntry:\n    while True: started.append(subprocess.Popen(['sleep', '600']))\n"
        "except OSError: pass\nif len(started) > 20: escaped(len(started))",
        2.0,
    ),
    Hostile("shell bomb", "os.execv('/bin/sh', ['sh', '-c', 'f() { f | f & }; f; sleep 600'])", 0.7),
    Hostile(
        "raised limits",
        "import resource\nfor name in ('NPROC', 'AS', 'FSIZE', 'NOFILE', 'CPU', 'MEMLOCK', 'NICE', 'RTPRIO'):\n"
        "    which = getattr(resource, 'RLIMIT_' + name); soft, hard = resource.getrlimit(which)\n"
        "    fails(resource.setrlimit, which, (hard + 1, hard + 1))\n"
        "    fails(resource.setrlimit, which, (-1, -1))",
    ),
    Hostile("daemon", f"forks(1, lambda: (os.setsid(), forks(1, {SLEEP})))"),
    Hostile("many daemons", f"forks(3, lambda: (os.setsid(), forks(3, lambda: (os.setsid(), {SLEEP}()))))"),
    Hostile("adopting orphans", f"libc.prctl(36, 1)\nforks(3, lambda: forks(2, {SLEEP}))\ntime.sleep(600)", 0.5),
    Hostile(
        "ignored signals",
        "for number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\nwhile True: time.sleep(600)",
        0.4,
    ),
    Hostile("stopped", "os.kill(os.getpid(), signal.SIGSTOP)", 0.4),
    Hostile("stopped children", "forks(3, lambda: os.kill(os.getpid(), signal.SIGSTOP)); time.sleep(600)", 0.4),
    Hostile(
        "signals to the keeper",
        "for number in range(1, 65):\n    try: os.kill(1, number)\n    except OSError: pass\n"
        "libc.sigqueue(1, 10, 0)\ncall(234, 1, 1, 9)\ncall(200, 1, 9)",
    ),
    Hostile("signals to all", "signal.signal(15, signal.SIG_IGN)\nos.kill(-1, 15); os.kill(0, 15); os.kill(-1, 9)"),
    Hostile(
        "signals by a file",
        "import fcntl\na, b = socket.socketpair()\nfor owner in (1, -1, -os.getpgrp()):\n"
        "    try:\n        fcntl.fcntl(a, fcntl.F_SETOWN, owner); fcntl.fcntl(a, 10, 9)\n"
        "        fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC)\n    except OSError: pass\n    b.send(b'x')",
    ),
    Hostile("children without a signal", "call(56, 0, 0, 0, 0, 0)\ntime.sleep(600)", 0.4, machine="x86_64"),
    Hostile("children of the keeper", "call(56, 0x8000, 0, 0, 0, 0)\ntime.sleep(600)", 0.4, machine="x86_64"),
    Hostile(
        "first thread ends", "threading.Thread(target=time.sleep, args=(600,)).start()\ncall(60, 0)", 0.5, "x86_64"
    ),
    Hostile("priority of the keeper", "fails(os.setpriority, 0, 1, 19)\nfails(os.setpriority, 2, 0, 19)"),
    Hostile(
        "scheduler of the keeper",
        "fails(os.sched_setscheduler, 1, os.SCHED_IDLE, os.sched_param(0))\n"
        "fails(os.sched_setaffinity, 1, {min(os.sched_getaffinity(0))})\n"
        "fails(os.sched_setscheduler, 1, os.SCHED_BATCH, "
        "os.sched_param(0))",
    ),
    Hostile(
        "limits of the keeper",
        "import resource\nfor which in range(16): fails(resource.prlimit, 1, which, (0, 0))\n"
        "fails(resource.prlimit, 1, 7)",
    ),
    Hostile("disk priority of the keeper", "refused('ioprio_set', 251, 1, 1, 0x6007)", machine="x86_64"),
    Hostile(
        "real-time scheduling",
        "for kind in (os.SCHED_FIFO, os.SCHED_RR): fails(os.sched_setscheduler, 0, kind, os.sched_param(1))\n"
        "fails(os.nice, -5)\nfails(os.setpriority, 0, 0, -20)",
    ),
    Hostile("all processors", "forks(12, lambda: exec('while True: pass'))\nwhile True: pass", 0.5),
    Hostile("sleep in native code", "libc.sleep(600)", 0.4),
    Hostile("wait for a child in vfork", "if os.fork() == 0:\n    call(58)\n    libc.sleep(600)\nlibc.sleep(600)", 0.4),
    Hostile("wait for a pipe", "os.mkfifo('p'); os.open('p', os.O_RDONLY)", 0.4),
    Hostile(
        "wait for a lock", "import fcntl\nf = open('l', 'w'); fcntl.flock(f, 2)\nfcntl.flock(open('l', 'w'), 2)", 0.4
    ),
    Hostile("wait for the disks", "for number in (162, 306): refused('sync', number, 0)", machine="x86_64"),
    Hostile(
        "time jump", "fails(time.clock_settime, 0, 0.0)\nrefused('settimeofday', 164, bytes(16), 0)", machine="x86_64"
    ),
    Hostile(
        "orphans that end",
        "for _ in range(40):\n    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n"
        "        os._exit(0)\n    os.wait()\n"
        "    time.sleep(0.01)",
    ),
    Hostile("new session and group", "os.setpgid(0, 0) if os.getpgrp() != os.getpid() else None\nfails(os.setsid)"),
    Hostile(
        "many timers",
        "n = 0\nwhile n < 5000 and call(222, 1, 0, bytes(8)) >= 0: n += 1\nif n > 2000: escaped(n)",
        machine="x86_64",
    ),
)
