"""Records which inputs determine the prompts of a run, and checks these inputs whenever a process opens the prompts.

    jsonl          the sha256 of the file; a file below `store.keep_prompts_bytes` is also copied into the run's
                   storage, and only the copy is read from then on
    file           the sha256 of the table, converted to JSON lines; the lines are always copied into the run's storage
    reasoning-gym  the package's version, and the sha256 of its held-out and first training questions
    column-sums    the sha256 of its held-out and first training questions
    sorting        the same as column-sums
    frozen-lake    the same as column-sums
    sokoban        the same as column-sums
    seeds          the same as column-sums
    import         the same as column-sums

Each prompt source has one record, a *pin*. Pins guarantee that the prompt at an index stays the same during a run, on
any machine; if a prompt has changed, the run cannot continue.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from rollflow.storage.errors import ConfigError, Corrupt, Missing
from rollflow.storage.objects.base import ObjectStore
from rollflow.tasks.prompts.base import Reader
from rollflow.tasks.prompts.config import (
    ColumnSumsPrompts,
    FileBase,
    FilePrompts,
    ImportPrompts,
    JsonlPrompts,
    ReasoningGymPrompts,
    SortingPrompts,
)
from rollflow.tasks.prompts.games.config import FrozenLakePrompts, KuhnPokerPrompts, SeedPrompts, SokobanPrompts
from rollflow.tasks.prompts.held_out import Split
from rollflow.tasks.prompts.run_prompts import RunPrompts
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.config import RunConfig

PACKAGE = "reasoning-gym"


class PinBase(BaseModel):
    """The record of one prompt source, from which a later change of the source is detected. `split` says how held-out
    questions are recognised: by "key" or, in older runs, by "text".
    """

    model_config = ConfigDict(frozen=True)

    split: Split = "text"


class KeptFile(PinBase):
    """The record of a prompt file; `kept` is the path of the copy in the run's storage, or "" if there is no copy."""

    path: str  # absolute path of the file, because each process of a run has its own working directory
    sha256: str
    size: int  # size in bytes
    kept: str


class FilePin(KeptFile):
    """The record of a prompt file in JSON lines."""

    kind: Literal["jsonl"] = "jsonl"


class TablePin(KeptFile):
    """The records of a prompt table and, if one is configured, of a second table with held-out questions."""

    kind: Literal["file"] = "file"
    held_out: KeptFile | None = None
    # name of the evaluation set -> the record of its file
    evaluation_sets: Mapping[str, KeptFile] = Field(default_factory=dict)


class FamilyPin(PinBase):
    """The record of a reasoning-gym task: the version of the package reasoning-gym, and a hash of sample questions."""

    kind: Literal["reasoning-gym"] = "reasoning-gym"
    version: str
    sha256: str


class ColumnSumsPin(PinBase):
    """The record of a prompt source of column sums: a hash of its held-out and first training questions."""

    kind: Literal["column-sums"] = "column-sums"
    sha256: str


class SortingPin(PinBase):
    """The record of a prompt source of digits to sort: a hash of its held-out and first training questions."""

    kind: Literal["sorting"] = "sorting"
    sha256: str


class GamePin(PinBase):
    """The record of a prompt source of a game or of seeds: a hash of its held-out and first training questions."""

    kind: Literal["frozen-lake", "sokoban", "kuhn-poker", "seeds"]
    sha256: str


class ImportPin(PinBase):
    """The record of a user-defined prompt source: a hash of its held-out and first training questions."""

    kind: Literal["import"] = "import"
    sha256: str


Pin = Annotated[
    FilePin | TablePin | FamilyPin | ColumnSumsPin | SortingPin | GamePin | ImportPin, Field(discriminator="kind")
]
PINS: TypeAdapter[tuple[Pin, ...]] = TypeAdapter(tuple[Pin, ...])


def read_once() -> Reader:
    """Return a reader that reads each prompt file only once, so that the same bytes are checked, hashed and copied."""
    return functools.cache(read_file)


def pin_prompts(config: RunConfig, prompts: RunPrompts, read: Reader) -> tuple[Pin, ...]:
    """Compute the records of prompt sources whose files were read with `read`."""
    pins: list[Pin] = []
    split = prompts.split
    for which, source in enumerate(config.prompts):
        match source:
            case JsonlPrompts():
                pins.append(FilePin(**_describe_file(config, source, read, split)))
            case FilePrompts():
                other = source.held_out_file
                held_out = KeptFile(**_describe_file(config, other, read, split)) if other else None
                files = source.set_files.items()
                sets = {name: KeptFile(**_describe_file(config, file, read, split)) for name, file in files}
                described = _describe_file(config, source, read, split)
                pins.append(TablePin(**described, held_out=held_out, evaluation_sets=sets))
            case ReasoningGymPrompts():
                pins.append(FamilyPin(split=split, version=package_version(PACKAGE), sha256=prompts.sha256(which)))
            case ColumnSumsPrompts():
                pins.append(ColumnSumsPin(split=split, sha256=prompts.sha256(which)))
            case SortingPrompts():
                pins.append(SortingPin(split=split, sha256=prompts.sha256(which)))
            case FrozenLakePrompts() | SokobanPrompts() | KuhnPokerPrompts() | SeedPrompts():
                pins.append(GamePin(kind=source.kind, split=split, sha256=prompts.sha256(which)))
            case ImportPrompts():
                pins.append(ImportPin(split=split, sha256=prompts.sha256(which)))
    return tuple(pins)


def _describe_file(config: RunConfig, source: FileBase, read: Reader, split: Split) -> dict[str, Any]:
    """Return the fields of a prompt file's record: the file's path, its hash, and the path of its copy.

    A copy is always stored if the file was converted, or if rows were dropped.
    """
    content = read(source)
    sha256, differs = hashlib.sha256(content).hexdigest(), isinstance(source, FilePrompts) or source.too_long == "drop"
    kept = f"prompts/{sha256}.jsonl" if len(content) <= config.store.keep_prompts_bytes or differs else ""
    on_hub = isinstance(source, FilePrompts) and source.chosen_format == "hub"
    path = source.path if on_hub else str(Path(source.path).expanduser().absolute())
    return {"split": split, "path": path, "sha256": sha256, "size": len(content), "kept": kept}


def split_of(pins: Sequence[Pin]) -> Split:
    """Return the attribute of a question ("key" or "text") that decides whether the run holds the question out."""
    return pins[0].split if pins else "text"


def store_prompts(store: ObjectStore, config: RunConfig, pins: Sequence[Pin], read: Reader) -> None:
    """Copy the prompt files whose records name a copy into the run's storage."""
    for source, pin in zip(config.prompts, pins, strict=True):
        if not isinstance(source, FileBase):
            continue
        for file in source.files:
            if kept := _find_record(file, source, pin).kept:
                store.put(kept, read(file))


def open_reader(store: ObjectStore, config: RunConfig, pins: Sequence[Pin]) -> Reader:
    """Return a reader of prompt files as they were when the run began.

    The reader raises `ConfigError` if a file without a stored copy has changed, and `Corrupt` if a copy has changed.
    """

    def read(source: FileBase) -> bytes:
        # equal prompt sources have equal records
        owner, found = next(
            (owner, pin)
            for owner, pin in zip(config.prompts, pins, strict=True)
            if isinstance(owner, FileBase) and source in owner.files
        )
        pin = _find_record(source, owner, found)
        return _read_kept(store, pin) if pin.kept else _read_unchanged(source, pin)

    return read


def _find_record(file: FileBase, source: FileBase, pin: Pin) -> KeptFile:
    """Return the record of one of a prompt source's files: its training, held-out or evaluation questions."""
    record: object = pin
    if isinstance(pin, TablePin) and file != source:
        sets = (pin.evaluation_sets[name] for name, one in source.set_files.items() if one == file)
        record = next(sets, pin.held_out)
    assert isinstance(record, KeptFile)
    return record


def _read_kept(store: ObjectStore, pin: KeptFile) -> bytes:
    try:
        content = store.get(pin.kept)
    except Missing as error:
        raise Corrupt(f"{store.uri}/{pin.kept}, the run's copy of {pin.path}, is missing") from error
    if hashlib.sha256(content).hexdigest() != pin.sha256:
        raise Corrupt(f"{store.uri}/{pin.kept}, the run's copy of {pin.path}, was altered")
    return content


def _read_unchanged(source: FileBase, pin: KeptFile) -> bytes:
    content = read_file(source.model_copy(update={"path": pin.path}))
    if (found := hashlib.sha256(content).hexdigest()) != pin.sha256:
        raise ConfigError(
            f"prompts.path = {source.path!r}: {pin.path} has changed since the run began (its sha256 is "
            f"{found[:12]} and was {pin.sha256[:12]}); put the original file back, or start a new run"
        )
    return content


def check_asked(config: RunConfig, pins: Sequence[Pin], prompts: RunPrompts) -> None:
    """Raise `ConfigError` if packages or user-defined sources generate other questions than when the run began."""
    for which, (source, pin) in enumerate(zip(config.prompts, pins, strict=True)):
        if isinstance(pin, FamilyPin) and isinstance(source, ReasoningGymPrompts):
            _check_family(source, pin, functools.partial(prompts.sha256, which))
        if isinstance(pin, ColumnSumsPin | SortingPin | GamePin) and prompts.sha256(which) != pin.sha256:
            raise ConfigError(
                f"prompts.kind = {source.kind!r}: this version of rollflow asks other questions than the run "
                "began with; use the version that the run began with, or start a new run"
            )
        if isinstance(pin, ImportPin) and isinstance(source, ImportPrompts) and prompts.sha256(which) != pin.sha256:
            raise ConfigError(
                f"prompts.path = {source.path!r}: the source asks other questions than when the run began; "
                "install the source's package as it was then, or draw from the seed alone if the source draws "
                "differently in every process"
            )


def _check_family(source: ReasoningGymPrompts, pin: FamilyPin, sha256: Callable[[], str]) -> None:
    key, here = f"prompts.family = {source.family!r}", package_version(PACKAGE)
    if here != pin.version:
        cure = f"install {PACKAGE}=={pin.version}, or start a new run"
        raise ConfigError(f"{key}: the run began with {PACKAGE} {pin.version}, but {here} is installed; {cure}")
    if sha256() != pin.sha256:
        raise ConfigError(
            f"{key}: {PACKAGE} {here} asks other questions than when the run began; install the package "
            "versions that the run began with, or name another family: a few families draw other questions "
            "in every process"
        )
