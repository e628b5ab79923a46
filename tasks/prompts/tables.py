"""Converts a table of prompts (JSON lines, CSV, Parquet or a saved data set) to JSON lines.

A run stores the JSON lines and reads prompts only from them, so a prompt never depends on the version of a library.
Line n of the JSON lines is row n of the table or, for a CSV file, the row that begins in line n of the file. The
columns of a table are renamed as `prompts.columns` says.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.arrow_tables import read_arrow
from rollflow.tasks.prompts.config import SUFFIXES, FileBase, FilePrompts
from rollflow.tasks.prompts.jsonl import read_bytes

LONGEST_FIELD = 2**31 - 1  # largest number of characters of a CSV value

Row = dict[str, Any]
Numbered = Iterable[tuple[int, Row]]


def read_file(config: FileBase) -> bytes:
    """Return the current content of a question source's file as JSON lines, converted from a table if necessary.

    Raises:
        ConfigError: the file cannot be read, or lacks a required column.
    """
    return convert_table(config) if isinstance(config, FilePrompts) else read_bytes(config, config.path)


def convert_table(config: FilePrompts) -> bytes:
    """Read a table and return its rows as JSON lines.

    Raises:
        ConfigError: the table cannot be read, or lacks a required column.
    """
    path = Path(config.path).expanduser()
    chosen = config.chosen_format or ("saved" if path.is_dir() else None)
    if config.split and chosen not in ("saved", "hub"):
        raise config.split_refusal("is a file, which has no splits; remove the key split")
    match chosen:
        case "jsonl":
            return _rename_lines(config, read_bytes(config, config.path))
        case "csv" | "tsv":
            return _write_lines(
                config, *_read_csv(config, read_bytes(config, config.path), "\t" if chosen == "tsv" else ",")
            )
        case "parquet" | "saved" | "hub":
            return _write_lines(config, *read_arrow(config, chosen, path))
    known = ", ".join(SUFFIXES)
    raise config.refusal(
        f"the suffix of the path is none of {known}, and there is no folder of this name; set prompts.format, or "
        "correct the path"
    )


def _rename_lines(config: FilePrompts, content: bytes) -> bytes:
    """Rename the columns of JSON lines; invalid lines are left for `rows.py` to report."""
    if not config.columns and not config.json_columns:
        return content
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content
    return "\n".join(_rename_line(config, number, line) for number, line in enumerate(text.split("\n"), 1)).encode()


def _rename_line(config: FilePrompts, number: int, line: str) -> str:
    repeated = False

    def build(pairs: list[tuple[str, Any]]) -> Row:
        nonlocal repeated
        repeated = repeated or len(dict(pairs)) < len(pairs)
        return dict(pairs)

    try:
        row = json.loads(line, object_pairs_hook=build)
    except (ValueError, RecursionError):
        return line
    return json.dumps(_rename(config, number, row)) if isinstance(row, dict) and not repeated else line


def _rename(config: FilePrompts, number: int, row: Mapping[str, Any]) -> Row:
    """Return a row with columns renamed as `prompts.columns` says. A column is dropped if another column gets its
    name.
    """
    row = {**row, **{name: _parse(config, number, name, row[name]) for name in config.json_columns if name in row}}
    mapped = {name: row[column] for name, column in config.columns.items() if column in row}
    left = {*config.columns, *config.columns.values()}
    return {**{name: value for name, value in row.items() if name not in left}, **mapped}


def _parse(config: FilePrompts, number: int, name: str, value: Any) -> Any:
    """Parse the text of a column that contains JSON; in a CSV file, an empty text means null."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except (ValueError, RecursionError) as error:
        where = f"{config.unit} {number}: column {name!r} is no JSON ({error})"
        raise config.refusal(f"{where}; correct it, or remove the column from prompts.json_columns") from None


def _read_csv(config: FilePrompts, content: bytes, delimiter: str) -> tuple[Sequence[str], Numbered]:
    """Return the header of a CSV file and the rows, each with the number of the row's first line."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise config.refusal(f"line {line}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    rows = _number_records(config, text, delimiter)
    _, header = next(rows, (1, []))
    if not header:
        raise config.refusal("the file is empty; name a file with a header and at least one row")

    def named() -> Iterator[tuple[int, Row]]:
        for number, values in rows:
            if len(values) != len(header):
                what = f"line {number}: the row has {len(values)} values, and the header has {len(header)} columns"
                raise config.refusal(f"{what}; correct the row, or put a value that contains {delimiter!r} in quotes")
            yield number, dict(zip(header, values, strict=True))

    return header, named()


def _number_records(config: FilePrompts, text: str, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(LONGEST_FIELD)
    rows, before = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 0
    while True:
        try:
            values = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            cure = "correct the quotes of the row that begins there"
            raise config.refusal(f"line {before + 1} of the file is not CSV ({error}); {cure}") from None
        if values:
            yield before + 1, values
        before = rows.line_num


def _write_lines(config: FilePrompts, header: Sequence[str], rows: Numbered) -> bytes:
    """Write the rows of a table as JSON lines, row n in line n."""
    check_columns(config, header)
    lines, last = list[str](), 0
    for number, row in rows:
        lines += [""] * (number - last - 1)
        try:
            lines.append(json.dumps(_rename(config, number, row), default=_to_text))
        except TypeError:
            lost = next(name for name, value in row.items() if not _is_json(value))
            what = f"{config.unit} {number}: column {lost!r} has bytes, which are not text"
            raise config.refusal(f"{what}; remove the column from the file") from None
        last = number
    return "\n".join(lines).encode()


def check_columns(config: FilePrompts, header: Sequence[str]) -> None:
    """Reject a table that lacks a required column, or has two columns of the same name."""
    if twice := [name for name, count in Counter(header).items() if count > 1]:
        raise config.refusal(f"the file has two columns with the name {twice[0]!r}; rename one of them")
    known = f"the columns are {', '.join(map(repr, header))}"
    for name, column in config.columns.items():
        if column not in header:
            raise ConfigError(
                f"prompts.columns.{name} = {column!r}: the file {config.path!r} has no such column ({known}); "
                "name one of them"
            )
    if missing := [name for name in config.json_columns if name not in header]:
        raise ConfigError(
            f"prompts.json_columns = {list(config.json_columns)}: the file {config.path!r} has no column "
            f"{missing[0]!r} ({known}); name one of them"
        )
    if "question" not in (*header, *config.columns):
        cure = 'set prompts.columns = {question = "..."} to one of them'
        raise config.refusal(f"the file has no column 'question' ({known}); {cure}")


def _to_text(value: object) -> str:
    """Return a date, a time or a decimal number as text, because JSON has no such types."""
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError("a value of the row is bytes, which JSON cannot contain")
    return str(value)


def _is_json(value: object) -> bool:
    try:
        json.dumps(value, default=_to_text)
    except TypeError:
        return False
    return True
