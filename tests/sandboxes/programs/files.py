"""Programs that try to reach files of the host, of another sandbox, or of the keeper (the process that supervises a
sandbox).
"""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

FILES = (
    Hostile("passwords", "opens('/etc/shadow', '/etc/passwd', '/etc/hostname', '/etc/hosts', '/etc/resolv.conf')"),
    Hostile("homes", "opens('/root', '/home', '/root/.ssh', '/root/.bashrc', '/var', '/srv', '/opt', '/mnt', '/run')"),
    Hostile("system files", "opens('/sys', '/sys/kernel', '/boot', '/dev/mem', '/dev/kmsg', '/dev/sda', '/dev/vda')"),
    Hostile("terminals", "opens('/dev/tty', '/dev/ptmx', '/dev/pts', '/dev/console', '/dev/fuse', '/dev/kvm')"),
    Hostile(
        "keeper's files", "opens(*(f'/proc/1/{n}' for n in ('environ', 'mem', 'maps', 'fd', 'fdinfo', 'map_files')))"
    ),
    Hostile(
        "keeper's folders", "opens('/proc/1/root', '/proc/1/cwd', '/proc/1/exe', '/proc/1/root/etc', '/proc/1/fd/0')"
    ),
    Hostile(
        "keeper's settings",
        "opens('/proc/1/oom_score_adj', '/proc/1/uid_map', '/proc/1/autogroup', '/proc/1/clear_refs', "
        "'/proc/1/coredump_filter', '/proc/1/mem', flags=os.O_RDWR)",
    ),
    Hostile(
        "kernel settings",
        "opens('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/sys/kernel/hostname', "
        "'/proc/sys/vm/drop_caches', '/proc/sys/user/max_user_namespaces', "
        "'/proc/sys/kernel/shmmax', flags=os.O_WRONLY)\nopens('/proc/kcore', '/proc/kmsg')",
    ),
    Hostile(
        "read-only folders",
        "import sysconfig\nfor path in ('/usr', '/box', '/', '/dev', '/etc', sysconfig.get_paths()['stdlib'], "
        "'/box/rollflow/tasks/sandboxes/box', '/proc'):\n    fails(os.mkdir, path + '/left')\n"
        "    fails(os.utime, path)\n    fails(os.chmod, path, 0o777)",
    ),
    Hostile(
        "the box's programs",
        "import glob\nopens(*glob.glob('/box/**/*.py', recursive=True), sys.executable, os.__file__, flags=os.O_RDWR)",
    ),
    Hostile(
        "other processes",
        "seen = [n for n in os.listdir('/proc') if n.isdigit()]\n"
        "if len(seen) > 2: escaped(seen)\nif os.getppid(): escaped(os.getppid())",
    ),
    Hostile("link to the keeper", "os.symlink('/proc/1/environ', 'a'); os.symlink('/proc/self/mem', 'b')\nopens('a')"),
    Hostile("hard link", "fails(os.link, '/usr/bin/env', 'env')\nfails(os.link, '/proc/1/environ', 'environ')"),
    Hostile(
        "device nodes",
        "import stat\nfor kind in (stat.S_IFCHR, stat.S_IFBLK):\n"
        "    for major, minor in ((1, 1), (1, 5), (5, 0), (8, 0), (254, 0)):\n"
        "        fails(os.mknod, f'd{major}', kind | 0o666, os.makedev(major, minor))",
    ),
    Hostile(
        "set-user programs",
        "import shutil, subprocess\nshutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)\n"
        "if b'uid=1000' not in (out := subprocess.run(['./id'], capture_output=True).stdout): escaped(out)\n"
        "for name in ('su', 'sudo', 'mount', 'passwd'):\n"
        "    if os.path.exists(f'/usr/bin/{name}'):\n"
        "        subprocess.run([f'/usr/bin/{name}', '-c', 'touch /usr/left'], capture_output=True, timeout=3, "
        "stdin=subprocess.DEVNULL)\n"
        "if os.path.exists('/usr/left'): escaped('su')",
    ),
    Hostile(
        "user ids",
        "for action in (os.setuid, os.setgid, os.seteuid, os.setegid):\n"
        "    for number in (0, 1, 65534):\n        fails(action, number)\nfails(os.setgroups, [0])\n"
        "fails(os.chown, '.', 0, 0)",
    ),
    Hostile(
        "pipes and sockets for the keeper",
        "os.mkfifo('pipe'); os.mkfifo('out'); os.symlink('pipe', 'link'); os.symlink('link', 'loop')",
    ),
    Hostile(
        "sparse file",
        "f = open('sparse', 'wb')\nfor size in (1 << 50, 1 << 40, 1 << 32):\n    fails(f.truncate, size)\n"
        "fails(os.posix_fallocate, f.fileno(), 0, 1 << 30)",
    ),
    Hostile(
        "no inodes left",
        "try:\n    for n in range(10**6): open(f'f{n}', 'w').close()\nexcept OSError: pass\n"
        "try:\n    for n in range(10**6): os.mkdir(f'd{n}')\nexcept OSError: pass\n"
        "if n > 1000: escaped(n)",
    ),
    Hostile(
        "long names",
        "try:\n    for n in range(10**6): os.symlink('x' * 4000, f'{n:0255}')\nexcept OSError: pass\n"
        "if n > 1000: escaped(n)",
    ),
    Hostile(
        "deep folders",
        "n = 0\ntry:\n    while True:\n        os.mkdir('d'); os.chdir('d'); n += 1\nexcept OSError: pass\n"
        "if n > 1000: escaped(n)",
    ),
    Hostile(
        "attributes of files",
        "n = 0\ntry:\n    while n < 100000: os.setxattr('.', f'user.{n}', b'x' * 60000); n += 1\n"
        "except OSError: pass\n"
        "if n > 1000: escaped(n)",
    ),
    Hostile(
        "writing to stdin",
        "try:\n    for flags in (os.O_RDWR, os.O_WRONLY):\n        f = os.open('/proc/self/fd/0', flags)\n"
        "        if os.write(f, b'x' * (1 << 20)): escaped('bytes that nobody counts')\nexcept OSError: pass\n"
        "try:\n    if os.write(0, b'x' * (1 << 20)): escaped('bytes that nobody counts')\nexcept OSError: pass\n"
        "fails(os.ftruncate, 0, 1 << 20)",
    ),
)
