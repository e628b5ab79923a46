"""Programs that attack the Python interpreter: its shutdown, its state, its texts, and what it inherited."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

PYTHON = (
    Hostile("exit", "sys.exit(0)"),
    Hostile("exit without cleaning", "os._exit(0)"),
    Hostile("exit functions", "import atexit\natexit.register(os._exit, 0)\n1 / 0"),
    Hostile("exit functions that wait", "import atexit\natexit.register(time.sleep, 600)", 0.4),
    Hostile("threads that wait", "threading.Thread(target=time.sleep, args=(600,)).start()", 0.4),
    Hostile("abort", "os.abort()"),
    Hostile("segmentation fault", "ctypes.string_at(0)"),
    Hostile("fault handler", "import faulthandler\nfaulthandler.enable()\nfaulthandler._sigsegv()"),
    Hostile("illegal instruction", "os.kill(os.getpid(), signal.SIGILL)"),
    Hostile("kill itself", "os.kill(os.getpid(), signal.SIGKILL)"),
    Hostile("endless recursion", "sys.setrecursionlimit(10**9)\ndef f(): f()\nf()"),
    Hostile("deep source", "eval('(' * 10**5 + ')' * 10**5)"),
    Hostile("large number", "x = 10 ** (10 ** 9)", 0.5),
    Hostile("slow pattern", "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')", 0.5),
    Hostile("blocked signals in native code", "libc.pause()", 0.4),
    Hostile(
        "error without an end", "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", 0.4
    ),
    Hostile("exit code that is no number", "sys.exit([float('nan')] * 10)"),
    Hostile("large exit code", "sys.exit(1 << 100)"),
    Hostile("exit hooks", "sys.excepthook = sys.unraisablehook = lambda *a: os._exit(0)\n1 / 0"),
    Hostile("streams", "sys.stdout = sys.stderr = None\nsys.__stdout__ = 1"),
    Hostile(
        "streams that lie",
        "class S:\n    def flush(self): os._exit(0)\n    def write(self, x): pass\n"
        "sys.stdout = sys.stderr = S()\n1 / 0",
    ),
    Hostile("unicode", "print('\\ud800')"),
    Hostile("quotes", "x = '''\"\"\"'''; y = r'\\\\'\nprint(x, y, '\\0', 'END')"),
    Hostile("encoding cookie", "exec(b'# coding: utf-7\\n+AHAAcgBpAG4AdA-(1)')"),
    Hostile("NUL in the source", "exec('x = 1\\0')"),
    Hostile(
        "state of the interpreter",
        "import builtins, json, random\nbuiltins.print = builtins.int = lambda *a: 666\n"
        "json.dumps = lambda *a: 'left'\n"
        "random.random = lambda: 0.5\nsys.modules['math'] = sys.modules['os'] = None\nsys.path[:] = ['/work/left']\n"
        "os.environ['LEFT'] = '1'\nsys.flags = None",
    ),
    Hostile(
        "files that Python reads",
        "for name in ('sitecustomize', 'usercustomize', 'math', 'json', 'random', 'struct', 'encodings'):\n"
        "    open(name + '.py', 'w').write('print(\"LEFT\")')\n"
        "open('x.pth', 'w').write('import os; print(\"LEFT\")')\n"
        "os.makedirs('__pycache__'); open('pyvenv.cfg', 'w').write('home = /work')",
    ),
    Hostile(
        "writes to the inherited heap",
        "import gc\nfor thing in gc.get_objects():\n"
        "    if type(thing) is dict and 'memory_bytes' in thing: thing['memory_bytes'] = 1 << 60\n"
        "x = (); ctypes.memset(id(256) + 24, 7, 1)",
    ),
    Hostile(
        "secrets in the inherited memory",
        "import re\nword = re.compile(b'SECRET-OF-AN[-]EARLIER[-]PROGRAM')\n"
        "for line in open('/proc/self/maps'):\n"
        "    low, high = (int(x, 16) for x in line.split()[0].split('-'))\n"
        "    if 'rw' not in line or high - low > 1 << 28: continue\n"
        "    try: os.lseek(fd := os.open('/proc/self/mem', os.O_RDONLY), low, 0)\n    except OSError: continue\n"
        "    try: data = os.read(fd, high - low)\n    except OSError: data = b''\n    os.close(fd)\n"
        "    if word.search(data): escaped('memory of an earlier program', line)",
    ),
    Hostile(
        "what the interpreter shows",
        "import gc\nframe = sys._getframe()\nwhile frame:\n"
        "    for value in (*frame.f_locals.values(), *frame.f_globals.values()):\n"
        "        if type(value) is socket.socket and value.fileno() >= 0: escaped('socket', value)\n"
        "    frame = frame.f_back\n"
        "for thing in gc.get_objects():\n    if type(thing) is socket.socket and thing.fileno() >= 0: escaped(thing)\n"
        "if any('pytest' in name for name in sys.modules): escaped('modules')",
    ),
    Hostile(
        "answers for the owner",
        "for n in range(3, 64):\n    try: os.write(n, struct.pack('!II', 2, 0) + b'{}'); escaped(n)\n"
        "    except OSError: pass",
    ),
    Hostile(
        "descriptors sent away",  # the kernel limits a user's descriptors in transit, for all sandboxes together
        "a, b = socket.socketpair()\nfails(socket.send_fds, a, [b'x'], [a.fileno(), b.fileno()])\n"
        "fails(a.sendmsg, [b'x'])",
    ),
    Hostile(
        "environment of the box",
        "data = open('/proc/self/environ').read()\nif len(data.split('\\0')) > 8: escaped(data)",
    ),
)
