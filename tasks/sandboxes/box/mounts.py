"""Mounts the file systems of one sandbox."""

from __future__ import annotations

from typing import Any

from rollflow.tasks.sandboxes.box.files import FOLDER
from rollflow.tasks.sandboxes.box.rights import check, libc

NOSUID, NODEV, NOEXEC = 2, 4, 8  # flags of mount
MNT_DETACH = 2  # flag of umount2


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Mount a file system; raise `OSError` if the kernel refuses the mount."""
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def mount_proc() -> None:
    """Mount `/proc` for the process namespace of the caller."""
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "")


def mount_folder(limits: dict[str, Any]) -> None:
    """Mount an empty folder in memory with these limits for the programs of a sandbox."""
    size = f"size={limits['folder_bytes']},nr_inodes={limits['folder_files']},mode=0755"
    mount("tmpfs", FOLDER, "tmpfs", NOSUID | NODEV, size)


def unmount(target: str) -> None:
    """Unmount a file system; raise `OSError` if the file system is still in use."""
    check(libc.umount2(target.encode(), 0), f"unmount {target}")


def detach(target: str) -> None:
    """Unmount a file system that open files may still use."""
    check(libc.umount2(target.encode(), MNT_DETACH), f"unmount {target}")
