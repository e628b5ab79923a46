"""Reads a table in Arrow's format from a Parquet file, a folder of the library `datasets`, or the Hugging Face hub.

Pyarrow reads files and folders; data sets of the hub need the library `datasets`.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.config import FilePrompts
from rollflow.tasks.prompts.jsonl import read_bytes

DEFAULT_SPLIT = "train"


def read_arrow(
    config: FilePrompts, chosen: Literal["parquet", "saved", "hub"], path: Path
) -> tuple[Sequence[str], Iterator[tuple[int, dict[str, Any]]]]:
    """Return the column names and the rows of an Arrow table, with rows numbered from 1.

    Raises:
        ConfigError: the table cannot be read.
    """
    match chosen:
        case "parquet":
            table = _read_parquet(config)
        case "saved":
            table = _read_saved(config, path)
        case "hub":
            table = _load_from_hub(config)
    try:
        names = list(table.column_names)
    except UnicodeDecodeError as error:
        raise config.refusal(f"the file has a column whose name is not UTF-8 ({error}); write the file again") from None
    for name, column in zip(names, table.columns, strict=True):
        try:
            column.validate(full=True)
        except (pa.ArrowException, ValueError) as error:
            why = _first_line(error)
            where = _locate(column, why)
            raise config.refusal(f"{where}column {name!r} has invalid values ({why}); write the file again") from None
    return names, _number_rows(config, table)


def _number_rows(config: FilePrompts, table: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    number = 0
    for batch in table.to_batches():
        try:
            rows = batch.to_pylist()
        except (pa.ArrowException, ValueError, OverflowError, LookupError, TypeError) as error:
            # a `LookupError` means an unknown time zone
            what = f"from row {number + 1} on, values cannot be read ({_first_line(error)})"
            raise config.refusal(f"{what}; write the file again") from None
        for row in rows:
            number += 1
            yield number, row


def _locate(column: Any, why: str) -> str:
    """Return a phrase that locates the table row of an Arrow error, or "" if the error names no row.

    No values of the damaged column are read, because damaged offsets could crash the process.
    """
    if (found := re.search(r"In chunk (\d+): .* string index (\d+)", why)) is None:
        return ""
    chunk, index = int(found[1]), int(found[2])
    return f"row {sum(map(len, column.chunks[:chunk])) + index + 1}: "


def _read_parquet(config: FilePrompts) -> Any:
    import pyarrow.parquet as pq

    content = read_bytes(config, config.path)
    try:
        return pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True).read()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise config.refusal(
            f"the file is not an intact Parquet file ({_first_line(error)}); write the file again"
        ) from None


def _read_saved(config: FilePrompts, path: Path) -> Any:
    folder = _find_split(config, path)
    state = _read_json(config, folder / "state.json")
    try:
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (KeyError, TypeError):
        raise config.refusal(
            "the file state.json does not list the data files of the data set; save the data set again"
        ) from None
    shards = [_read_shard(config, folder, name) for name in names]
    try:
        return pa.concat_tables(shards) if shards else pa.table({})
    except pa.ArrowException as error:
        raise config.refusal(
            f"the files of the data set differ in their columns ({_first_line(error)}); save the data set again"
        ) from None


def _find_split(config: FilePrompts, path: Path) -> Path:
    """Return the folder of the data set's chosen split, or the data set's own folder if the data set has no splits."""
    if not (path / "dataset_dict.json").exists():
        if config.split:
            raise config.split_refusal("has no splits; remove the key split")
        if not (path / "state.json").exists():
            raise config.refusal(
                "the folder was not written by `save_to_disk`, because it has no state.json; name a folder that was"
            )
        return path
    splits = _read_json(config, path / "dataset_dict.json").get("splits")
    found = [str(split) for split in splits] if isinstance(splits, list) else []
    split = config.split or DEFAULT_SPLIT
    if split not in found:
        raise config.split_refusal(f"has only the splits {', '.join(found)}; name one of them")
    return path / split


def _read_json(config: FilePrompts, path: Path) -> dict[str, Any]:
    try:
        found = json.loads(read_bytes(config, str(path)))
    except (ValueError, RecursionError) as error:
        raise config.refusal(
            f"the file {path.name} is not JSON ({_first_line(error)}); save the data set again"
        ) from None
    if not isinstance(found, dict):
        raise config.refusal(f"the file {path.name} is not a JSON object; save the data set again")
    return found


def _read_shard(config: FilePrompts, folder: Path, name: str) -> Any:
    content = read_bytes(config, str(folder / name))
    try:
        return pa.ipc.open_stream(pa.BufferReader(content)).read_all()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise config.refusal(
            f"the file {name} is not an Arrow file ({_first_line(error)}); save the data set again"
        ) from None


def _load_from_hub(config: FilePrompts) -> Any:
    try:
        from datasets import load_dataset
    except ImportError:
        cure = "pip install 'rollflow[datasets]', or save the data set with `save_to_disk` and name the folder"
        raise ConfigError(f'prompts.format = "hub": the library `datasets` is not installed; {cure}') from None
    try:
        loaded = load_dataset(config.path, config.subset, split=config.split or DEFAULT_SPLIT)
        return loaded.with_format("arrow")[:]
    except Exception as error:  # noqa: BLE001 - the library raises errors of any type
        cure = "correct prompts.path, prompts.subset or prompts.split"
        raise config.refusal(f"the data set cannot be loaded ({_first_line(error)}); {cure}") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
