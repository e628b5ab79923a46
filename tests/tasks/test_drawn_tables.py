"""Tests random invalid tables in every format: each is refused in one sentence that names the file, row and column."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from rollflow.flows.config import parse_config
from rollflow.storage.errors import ConfigError
from rollflow.tasks.prompts.tables import read_file
from rollflow.tasks.run.prompt_check import read_files
from tests.support.counts import examples
from tests.support.refused import refused_alike

Rows = list[dict[str, Any]]


def to_jsonl(rows: Rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def to_csv(rows: Rows) -> bytes:
    lines = [list(rows[0]), *(list(row.values()) for row in rows)]
    return "".join(",".join("" if one is None else str(one) for one in line) + "\n" for line in lines).encode()


def to_parquet(rows: Rows) -> bytes:
    pq.write_table(pa.Table.from_pylist(rows), file := io.BytesIO(), write_page_checksum=True)
    return file.getvalue()


def to_arrow(rows: Rows) -> bytes:
    table, file = pa.Table.from_pylist(rows), io.BytesIO()
    with pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    return file.getvalue()


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "jsonl": to_jsonl,
    "csv": to_csv,
    "parquet": to_parquet,
    "saved": to_arrow,
}
TYPES = {  # a column of a table has one type
    "null": [None],
    "list": [["2"], ["2", "3"]],
    "object": [{"a": 1}],
    "truth": [True, False],
    "fraction": [7.0, float("nan"), float("inf")],
}
FIRST = {"jsonl": 1, "csv": 2, "parquet": 1, "saved": 1}  # number of the first row


def put(folder: Path, form: str, content: bytes) -> Path:
    if form != "saved":
        (path := folder / f"mine.{form}").write_bytes(content)
        return path
    (path := folder / "saved").mkdir(exist_ok=True)
    (path / "mine.arrow").write_bytes(content)
    (path / "state.json").write_text('{"_data_files": [{"filename": "mine.arrow"}]}')
    return path


def check(path: Path) -> str | None:
    """Return the sentence that refuses a file, or None if all its rows can be asked and scored."""
    source = {"kind": "file", "path": str(path), "columns": {"question": "problem", "answer": "solution"}}
    config = parse_config({"prompts": [source], "reward": {"kind": "exact"}})
    try:
        read_files(config, read_file)
        return None
    except ConfigError as error:
        sentence = str(error)
    assert "\n" not in sentence
    assert sentence.startswith("prompts.")
    assert str(path) in sentence
    return sentence


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drawn")


@pytest.mark.many
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=examples(1000), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(data=st.data())
def test_random_bad_table_value_is_refused_with_its_row_number(form: str, data: st.DataObject, place: Path) -> None:
    """All values of the column have the same type, because some formats need one type for each column."""
    count = data.draw(st.integers(1, 12))
    bad = data.draw(st.integers(0, count - 1))
    column = data.draw(st.sampled_from(["problem", "solution"]))
    kind = data.draw(st.sampled_from(["null", "empty"] if form == "csv" else ["empty", *TYPES]))
    value = " " if kind == "empty" else data.draw(st.sampled_from(TYPES[kind]))
    rows: Rows = [{"problem": f"{n} + 1?", "solution": str(n + 1), "more": n} for n in range(count)]
    for n in range(count):
        if n == bad or kind not in ("null", "empty"):
            rows[n][column] = value
    first = FIRST[form] + (bad if kind in ("null", "empty") else 0)
    sentence = check(put(place, form, FORMATS[form](rows)))
    event(f"{kind} in {column}")
    assert sentence is not None
    unit = "line" if form in ("jsonl", "csv") else "row"
    assert f": {unit} {first}: " in sentence
    # the scorer's own sentence about an empty answer names the answer, and not the column
    assert f"column {column!r}" in sentence or (kind in ("null", "empty") and "the answer is empty" in sentence)


@pytest.mark.many
@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=examples(1000), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(data=st.data())
def test_randomly_damaged_prompt_file_is_refused_or_read(form: str, data: st.DataObject, place: Path) -> None:
    """A cut or overwritten file is read, or refused in one sentence. It causes no other error."""
    content = FORMATS[form]([{"problem": f"{n} + 1?", "solution": str(n + 1)} for n in range(8)])
    at = data.draw(st.integers(0, len(content) - 1))
    piece = data.draw(st.binary(max_size=4))
    cut = data.draw(st.booleans())
    damaged = content[:at] + piece + (b"" if cut else content[at + len(piece) :])
    event("refused" if check(put(place, form, damaged)) else "read")


ONE: Rows = [{"problem": "1", "solution": "2"}]
WRONG: dict[str, tuple[str, bytes, str]] = {
    "an empty CSV": ("csv", b"", "the file is empty; name a file with a header and at least one row"),
    "only a header": ("csv", b"problem,solution\n", "the file has no lines"),
    "a ragged row": (
        "csv",
        b"problem,solution\n1,2\n1\n",
        "line 3: the row has 1 values, and the header has 2 columns",
    ),
    "a comma too many": ("csv", b"problem,solution\n1,2,3\n", "line 2: the row has 3 values"),
    "an open quote": (
        "csv",
        b'problem,solution\n1,2\n"3,4\n5,6\n',
        "line 3 of the file is not CSV (unexpected end of data)",
    ),
    "text after a quote": (
        "csv",
        b'problem,solution\n"1"2,3\n',
        "line 2 of the file is not CSV (',' expected after '\"')",
    ),
    "Latin-1": ("csv", b"problem,solution\n1,2\ncaf\xe9,2\n", "line 3: byte 24 is not UTF-8; save the file as UTF-8"),
    "UTF-16": ("csv", "problem,solution\n1,2\n".encode("utf-16"), "line 1: byte 0 is not UTF-8"),
    "two columns of a name": (
        "csv",
        b"problem,solution,problem\n1,2,3\n",
        "the file has two columns with the name 'problem'",
    ),
    "no such column": ("csv", b"problem,answer\n1,2\n", "has no such column (the columns are 'problem', 'answer')"),
    "an empty Parquet file": ("parquet", b"", "the file is not an intact Parquet file ("),
    "a broken footer": (
        "parquet",
        to_parquet([{"problem": "1", "solution": "2"}])[:-5],
        "the file is not an intact Parquet file",
    ),
    "only nulls": (
        "parquet",
        to_parquet([{"problem": None, "solution": None}]),
        "row 1: column 'problem' is null (null)",
    ),
    "an Arrow file that was cut": (
        "saved",
        to_arrow([{"problem": "1", "solution": "2"}])[:-60],
        "the file mine.arrow is not an Arrow",
    ),
    "an empty Arrow file": ("saved", b"", "the file mine.arrow is not an Arrow file"),
    "a line without the column": ("jsonl", b'{"problem": "1"}\n', "line 1: it has no column 'solution'; give it one"),
    "Latin-1 in a line": ("jsonl", to_jsonl(ONE) + b'{"problem": "caf\xe9"}\n', "line 2: byte 50 is not UTF-8; save"),
    "a repeated key": ("jsonl", b'{"problem": "1", "problem": "1"}\n', "line 1: a key is repeated (problem); keep one"),
}


@pytest.mark.parametrize(("form", "content", "words"), WRONG.values(), ids=WRONG)
def test_malformed_prompt_table_is_refused(form: str, content: bytes, words: str, tmp_path: Path) -> None:
    sentence = check(put(tmp_path, form, content))
    assert sentence is not None
    assert words in sentence


def test_prompt_table_without_rows_is_refused(tmp_path: Path) -> None:
    table = pa.table({"problem": pa.array([], pa.string()), "solution": pa.array([], pa.string())})
    pq.write_table(table, tmp_path / "mine.parquet")
    sentence = check(tmp_path / "mine.parquet")
    assert sentence is not None
    assert sentence.endswith("the file has no rows; name a file with at least one row")


def test_invalid_text_in_a_prompt_table_is_refused(tmp_path: Path) -> None:
    """Arrow does not check the bytes of a text when it writes them."""
    text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    pq.write_table(pa.table({"problem": text, "solution": ["1"]}), tmp_path / "mine.parquet")
    sentence = check(tmp_path / "mine.parquet")
    assert sentence is not None
    assert "row 1: column 'problem' has invalid values (In chunk 0: Invalid: Invalid UTF8" in sentence


def test_unknown_time_zone_of_a_table_is_refused(tmp_path: Path) -> None:
    times = pa.array([0], pa.timestamp("s", tz="Mars/Phobos"))
    pq.write_table(pa.table({"problem": ["1"], "solution": ["1"], "time": times}), tmp_path / "mine.parquet")
    sentence = check(tmp_path / "mine.parquet")
    assert sentence is not None
    assert "from row 1 on, values cannot be read ('Mars/Phobos'); write the file again" in sentence


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_file_that_may_never_end_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    sentence = check(path)
    assert sentence is not None
    assert sentence.endswith("cannot be read: it is not a regular file; name a file")


def test_check_and_run_refuse_a_table_with_equal_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLFLOW_HOME", str(tmp_path / "home"))
    (tmp_path / "mine.csv").write_text("question,answer\n1 + 1,2\n2 + 2\n")
    recipe = (
        f'[policy.cold_start]\n[reward]\nkind = "exact"\n[[prompts]]\nkind = "file"\npath = "{tmp_path}/mine.csv"\n'
    )
    (tmp_path / "recipe.toml").write_text(recipe)
    sentence = refused_alike(capsys, str(tmp_path / "recipe.toml"))
    assert sentence.startswith(f"prompts.path = '{tmp_path}/mine.csv': line 3: the row has 1 values")
