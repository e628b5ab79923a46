"""The `[sandbox]` section: one class for each kind of sandbox."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollflow.tasks.runtime.sections import LONGEST_SECONDS, Section

MIB = 2**20


class SandboxBase(Section):
    """The limits of one sandbox, and what all sandboxes of a run share."""

    kind: str
    memory_bytes: int = Field(
        256 * MIB, ge=32 * MIB, description="memory that all processes of one sandbox may use together, in bytes"
    )
    processes: int = Field(32, ge=4, le=4096, description="largest number of processes and threads in one sandbox")
    open_files: int = Field(256, ge=32, le=65536, description="largest number of open files of one process")
    folder_bytes: int = Field(64 * MIB, ge=MIB, description="largest size of all files in a sandbox's folder, in bytes")
    folder_files: int = Field(4096, ge=64, description="largest number of files in a sandbox's folder")
    output_bytes: int = Field(
        MIB, ge=1024, description="largest number of bytes that a program may write to stdout, and to stderr"
    )
    start_seconds: float = Field(
        30.0, gt=0, le=LONGEST_SECONDS, description="seconds allowed for the start of the sandboxes' common processes"
    )
    spares: int = Field(
        4, ge=0, le=256, description="number of empty sandboxes that are created ahead, so that a program starts sooner"
    )


class BubblewrapSandbox(SandboxBase):
    kind: Literal["bubblewrap"] = Field(
        "bubblewrap", description="Linux namespaces, set up by bwrap (Debian's package bubblewrap)"
    )
    imports: tuple[str, ...] = Field(
        (
            *("bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq", "itertools"),
            *("json", "math", "operator", "random", "re", "statistics", "string", "typing"),
        ),
        description="Python modules that are imported once, before the first program; a program then imports them in "
        "no time",
    )


class SandlockSandbox(SandboxBase):
    kind: Literal["sandlock"] = Field(
        "sandlock", description="Landlock and seccomp by the package sandlock; needs neither root nor namespaces"
    )


class UnsafeProcessSandbox(SandboxBase):
    kind: Literal["unsafe-process"] = Field(
        "unsafe-process",
        description="plain processes, which protect from nothing: a program can read, change and send everything that "
        "the user of the run can",
    )


SandboxConfig = Annotated[BubblewrapSandbox | SandlockSandbox | UnsafeProcessSandbox, Field(discriminator="kind")]
