"""Programs that try to reach a network, or to reach another sandbox through a socket."""

from __future__ import annotations

from tests.sandboxes.programs.base import Hostile

NETWORK = (
    Hostile("tcp", "fails(socket.create_connection, ('127.0.0.1', 22), 1)"),
    Hostile("udp", "fails(socket.socket, socket.AF_INET, socket.SOCK_DGRAM)"),
    Hostile("raw", "fails(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)"),
    Hostile("packet", "fails(socket.socket, 17, socket.SOCK_RAW, 768)"),
    Hostile("ipv6", "fails(socket.socket, socket.AF_INET6)"),
    Hostile("netlink", "fails(socket.socket, 16, socket.SOCK_RAW, 0)"),
    Hostile("unix", "fails(socket.socket, socket.AF_UNIX)"),
    Hostile("vsock", "fails(socket.socket, 40, socket.SOCK_STREAM)"),
    Hostile("kernel crypto", "fails(socket.socket, 38, socket.SOCK_SEQPACKET)"),
    Hostile("domain names", "fails(socket.getaddrinfo, 'example.com', 80)"),
    Hostile("server", "fails(socket.create_server, ('127.0.0.1', 0))"),
    Hostile(
        "pair of another family",
        "for family in (2, 10, 16, 17, 30, 38, 40):\n    fails(socket.socketpair, family, socket.SOCK_STREAM)",
    ),
    Hostile(
        "abstract name by bind",
        "for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):\n"
        "    fails(socket.socketpair(socket.AF_UNIX, kind)[0].bind, '\\0name')",
    ),
    Hostile("pair without connection", "fails(socket.socketpair, socket.AF_UNIX, socket.SOCK_DGRAM)"),
    Hostile(
        "abstract name by credentials",
        "try:\n"
        "    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "    a.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1); a.send(b'x'); b.close()\n"
        "    try: a.send(b'x')\n"
        "    except OSError: pass\n"
        "    if a.getsockname(): escaped('others can send to', a.getsockname())\n"
        "except OSError: pass",
    ),
    Hostile(
        "network of the channel",
        "import fcntl\nfor number in (3, *range(4, 64)):\n"
        "    for request in (0x8912, 0x8913, 0x8927, 0x894C, 0x89E0):\n"
        "        try: fcntl.ioctl(number, request, bytes(64))\n"
        "        except OSError: continue\n"
        "        escaped('ioctl', number, hex(request))\n"
        "a, b = socket.socketpair()\nfails(fcntl.ioctl, a.fileno(), 0x8912, bytes(16))",
    ),
    Hostile("listening pair", "a, b = socket.socketpair()\nfails(a.listen)\nfails(a.accept)\nfails(a.connect, '\\0x')"),
)
