"""Programs that try to hold more memory than the sandbox allows. `HELD`, a number of bytes, is far above the limit."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

HELD = 320 << 20
MORE = f"""
held = 0
size = 16 << 20
def hold(count):
    global held
    held += count
    if held > {HELD}:
        time.sleep(0.2)
        escaped(held)
        time.sleep(600)
"""
FILL = "m = bytearray(size)\nfor at in range(0, size, 4096): m[at] = 1\n"
# A shared region stays in memory after a process has unmapped it, as long as a mapping of one page is left.
UNMAPPED = """
libc.mmap.restype = ctypes.c_void_p
def shared(fd, flags):
    at = libc.mmap(None, ctypes.c_size_t(size), 3, flags, fd, ctypes.c_long(0))
    if at in (None, ctypes.c_void_p(-1).value): sys.exit('no memory')
    ctypes.memset(at, 1, size)
    libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t(size - 4096))
    hold(size)
"""


def _memory(name: str, code: str, seconds: float = 4.0, machine: str = "") -> Hostile:
    return Hostile(name, MORE + code, seconds, machine)


MEMORY = (
    _memory("one process", "kept = []\nwhile True: kept.append(b'x' * size); hold(size)"),
    _memory(
        "several processes",
        f"size = 40 << 20\nforks(12, lambda: (b'x' * size, time.sleep(600)))\ntime.sleep(1)\nheld = {HELD}\nhold(1)",
    ),
    _memory(
        "shared memory",
        "kept = []\nwhile True:\n    m = mmap.mmap(-1, size); m.write(b'x' * size); kept.append(m); hold(size)",
    ),
    _memory("unmapped shared memory", UNMAPPED + "while True: shared(-1, 0x21)"),
    _memory(
        "unmapped memory of a device", UNMAPPED + "zero = os.open('/dev/zero', os.O_RDWR)\nwhile True: shared(zero, 1)"
    ),
    _memory(
        "dropped shared memory",
        "kept = []\nwhile True:\n    m = mmap.mmap(-1, size); m.write(b'x' * size); m.madvise(mmap.MADV_DONTNEED)\n"
        "    kept.append(m); hold(size)",
    ),
    _memory(
        "pages given to a pipe",
        "import itertools\nsize = 2 << 20\nlibc.mmap.restype = ctypes.c_void_p\n"
        "libc.vmsplice.restype = ctypes.c_long\nfds = []\n"
        "while True:\n"
        "    r, w = os.pipe(); fds += [r, w]\n"
        "    for _ in range(16):\n"
        "        at = libc.mmap(None, ctypes.c_size_t(2 * size), 3, 0x22, -1, ctypes.c_long(0))\n"
        "        start = (at + size - 1) // size * size\n"
        "        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), 14); ctypes.memset(start, 1, size)\n"
        "        if libc.vmsplice(w, struct.pack('PN', start, 1), 1, 2) != 1: sys.exit('refused')\n"
        "        libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(2 * size)); hold(size)",
    ),
    _memory(  # the kernel charges a socket one byte, but the socket keeps the whole page after the file was truncated
        "pages given to a socket",
        "f = os.open('f', os.O_RDWR | os.O_CREAT); r, w = os.pipe(); kept = []\ntry:\n    while True:\n"
        "        a, b = socket.socketpair(); kept += [a, b]; a.setblocking(False)\n"
        "        try:\n            while True:\n                os.ftruncate(f, 0); os.pwrite(f, b'x' * 65536, 0)\n"
        "                for k in range(16): os.splice(f, w, 1, offset_src=4096 * k)\n"
        "                hold(4096 * os.splice(r, a.fileno(), 16, flags=2))\n"
        "        except BlockingIOError: os.read(r, 16)\nexcept OSError: pass",
    ),
    _memory("memory file", "f = os.memfd_create('x')\nwhile True: os.write(f, b'x' * size); hold(size)"),
    _memory(
        "folder", "f = open('x', 'wb')\nfor n in range(100):\n    open(f'f{n}', 'wb').write(b'x' * size); hold(size)"
    ),
    _memory(
        "deleted files",
        "kept = []\nwhile True:\n    f = open('x', 'wb', 0); os.unlink('x'); f.write(b'x' * size); "
        "kept.append(f); hold(size)",
    ),
    _memory(
        "pipes",
        "import fcntl\nkept = []\ntry:\n    while True:\n"
        "        r, w = os.pipe(); kept += [r, w]; fcntl.fcntl(w, 1031, 1 << 20)\n"
        "        os.set_blocking(w, False); hold(os.write(w, b'x' * (1 << 20)))\nexcept OSError: pass",
    ),
    _memory(
        "sockets",
        "size = 1 << 20\ndef fill():\n    kept = []\n    try:\n        while True:\n"
        "            for s in socket.socketpair():\n"
        "                kept.append(s); s.setblocking(False); s.setsockopt(1, 7, size)\n"
        "                try:\n                    while True: s.send(b'x' * 32768)\n"
        "                except BlockingIOError: pass\n    except OSError: pass\n    time.sleep(600)\n"
        f"forks(10, fill)\ntime.sleep(2)\nheld = {HELD}\nhold(1)",
    ),
    _memory(
        "first thread ends",
        "def fill():\n    time.sleep(0.1)\n    kept = []\n    while True: kept.append(b'x' * size); hold(size)\n"
        "threading.Thread(target=fill).start()\ncall(60, 0)",
        machine="x86_64",
    ),
    _memory(
        "hidden process",
        "libc.prctl(4, 0, 0, 0, 0)\nkept = []\nwhile True: kept.append(b'x' * size); hold(size)",
    ),
    _memory(
        "hidden command",
        "import shutil\nshutil.copy('/bin/dd', 'dd'); os.chmod('dd', 0o111)\n"
        "forks(1, lambda: os.execv('./dd', ['dd', 'if=/dev/zero', 'of=/dev/null', 'bs=300M', 'count=1000']))\n"
        f"time.sleep(1)\nheld = {HELD}\nhold(1)",
    ),
    _memory("locked memory", "libc.mlockall(7)\nkept = []\nwhile True: kept.append(b'x' * size); hold(size)"),
    _memory(
        "huge pages", "while True:\n    m = mmap.mmap(-1, 1 << 21, flags=0x40022)\n    escaped('huge page'); break"
    ),
    _memory("message queues", "while (q := call(68, 0, 0o666)) >= 0: escaped('queue', q); break", machine="x86_64"),
    _memory(
        "semaphores", "while (q := call(64, 0, 32000, 0o666)) >= 0: escaped('semaphores', q); break", machine="x86_64"
    ),
    _memory(
        "shared segments",
        "while (q := call(29, 0, 1 << 24, 0o666)) >= 0: escaped('segment', q); break",
        machine="x86_64",
    ),
    _memory(
        "file events",
        "refused('inotify', 253)\nrefused('inotify', 294, 0)\nrefused('landlock', 444, 0, 0, 1)",
        machine="x86_64",
    ),
    _memory("reserved addresses", "kept = []\nfor _ in range(100): kept.append(mmap.mmap(-1, 1 << 30, flags=0x4022))"),
    _memory(
        "arguments of a command",
        "import subprocess\nfor _ in range(3):\n    try: subprocess.run(['/bin/true', *['x' * 100000] * 100])\n"
        "    except OSError: pass\n"
        "forks(8, lambda: os.execv('/bin/sleep', ['sleep', '600', *['x' * 100000] * 18]))\ntime.sleep(600)",
        0.7,
    ),
    _memory("growing stack", "import resource\nsys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()"),
    _memory(
        "copied pages",
        f"size = 30 << 20\nx = bytearray(size)\ndef fill():\n    x[::4096] = b'y' * len(x[::4096])\n"
        f"    time.sleep(600)\nforks(12, fill)\ntime.sleep(1)\nheld = {HELD}\nhold(1)",
    ),
)
