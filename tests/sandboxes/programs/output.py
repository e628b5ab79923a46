"""Programs that try to disturb or to fill the pipes through which their output is read."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

OUTPUT = (
    Hostile("flood of stdout", "while True: os.write(1, b'x' * 65536)"),
    Hostile("flood of stderr", "while True: os.write(2, b'x' * 65536)"),
    Hostile(
        "flood of both", "forks(4, lambda: [os.write(n % 2 + 1, b'x' * 9999) for n in range(10**9)])\ntime.sleep(600)"
    ),
    Hostile("flood by children that live on", "forks(3, lambda: [os.write(1, b'x' * 9999) for _ in range(10**9)])"),
    Hostile("slow drip", "while True: os.write(1, b'x'); time.sleep(0.001)", 0.5),
    Hostile("closed output", "os.close(0); os.close(1); os.close(2); time.sleep(600)", 0.4),
    Hostile("closed output and exit", "os.closerange(0, 256)"),
    Hostile(
        "larger pipe",
        "import fcntl\nfcntl.fcntl(1, 1031, 1 << 20)\nos.write(1, b'x' * 99_000)\ntime.sleep(0.1)\n"
        "os.write(1, b'x' * 200_000)",
    ),
    Hostile(
        "exit in a flood",
        "os.write(1, b'x' * 65000)\nforks(8, lambda: time.sleep(9))\nos.write(1, b'x' * 60000)\nos._exit(0)",
    ),
    Hostile(
        "stolen output",
        "def steal():\n    fd = os.open('/proc/self/fd/1', os.O_RDONLY | os.O_NONBLOCK)\n    while True:\n"
        "        try: os.read(fd, 65536)\n        except BlockingIOError: pass\n"
        "forks(3, steal)\nwhile True:\n    os.write(1, b'x')",
        0.7,
    ),
    Hostile(
        "without blocking",
        "os.set_blocking(1, False)\ntry:\n    while True: os.write(1, b'x' * 65536)\nexcept OSError: pass",
    ),
    Hostile(
        "asynchronous output",
        "import fcntl\nfcntl.fcntl(1, fcntl.F_SETOWN, 1)\nfcntl.fcntl(1, fcntl.F_SETFL, os.O_ASYNC)\nos.write(1, b'x')",
    ),
    Hostile(
        "output to itself",
        "fd = os.open('/proc/self/fd/1', os.O_RDWR)\nos.dup2(fd, 0); os.dup2(fd, 2)\ntime.sleep(600)",
        0.4,
    ),
    Hostile("pipe that stays open", "os.dup2(1, 50)\nforks(2, lambda: (os.setsid(), time.sleep(600)))"),
    Hostile("not a text", "os.write(1, bytes(range(256)) * 100); os.write(2, b'\\xff\\xfe\\x00' * 100)"),
    Hostile("terminal codes", "print('\\x1b]0;x\\x07\\x1b[2J\\x1bc' * 100)"),
)
