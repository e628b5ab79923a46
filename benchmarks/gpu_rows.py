"""Creates, stores and formats the rows of the table of `make gpu`.

A failed check makes the exit code 1; a missed target is only reported. A row without a limit is a measured value. This
module imports only the standard library, because the first process of `make gpu` may have nothing else.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

OK, FAILED, ERROR = "ok", "FAILED", "ERROR"
HOLDS, MISSED = "holds", "missed"
NO_GPU = "skipped: no GPU"
WRONG = {FAILED, ERROR}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `value` is a number or a text."""

    what: str
    value: float | str
    unit: str = ""
    bound: str = ""
    verdict: str = ""
    part: str = ""
    seconds: float = 0.0  # seconds since the part began


Part = Callable[[], Iterator[Row]]


def check_at_most(what: str, value: float, bound: float, unit: str = "") -> Row:
    """Create the row of a value that must not exceed `bound`; NaN fails."""
    return Row(what, value, unit, f"<= {bound:.3g}", OK if value <= bound else FAILED)


def check_at_least(what: str, value: float, bound: float, unit: str = "") -> Row:
    """Create the row of a value that must not be below `bound`; NaN fails."""
    return Row(what, value, unit, f">= {bound:.3g}", OK if value >= bound else FAILED)


def check_that(what: str, holds: bool, value: float | str = "") -> Row:
    """Create the row of a statement that must be true."""
    return Row(what, value or ("yes" if holds else "no"), "", "yes", OK if holds else FAILED)


def target_at_least(what: str, value: float, bound: float, unit: str = "") -> Row:
    """Create the row of a value that should not be below `bound`."""
    return Row(what, value, unit, f">= {bound:.3g}", HOLDS if value >= bound else MISSED)


def target_at_most(what: str, value: float, bound: float, unit: str = "") -> Row:
    """Create the row of a value that should not exceed `bound`."""
    return Row(what, value, unit, f"<= {bound:.3g}", HOLDS if value <= bound else MISSED)


def guard(what: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yield rows. If an exception is raised, yield a row that describes it, so that the caller continues."""
    try:
        yield from rows()
    except Exception as error:  # noqa: BLE001 - one case's failure is a row, and not the end of the others
        traceback.print_exc()
        yield Row(what, f"{type(error).__name__}: {error}"[:300], verdict=ERROR)


def read_row(line: str) -> Row:
    """Read a row that `write_row` wrote."""
    return Row(**json.loads(line))


def write_row(row: Row) -> str:
    """Return the row as one line of JSON."""
    return json.dumps(asdict(row))


def save_rows(rows: Sequence[Row], file: Path | None) -> None:
    """Write all rows so far as JSON."""
    if file is not None:
        file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def format_rows(rows: Sequence[Row]) -> str:
    """Return the table as text."""
    lines = [("part", "what", "value", "unit", "bound", "verdict")]
    lines += [(row.part, row.what, _shown(row.value), row.unit, row.bound, row.verdict) for row in rows]
    widths = [min(66, max(len(line[n]) for line in lines)) for n in range(6)]
    return "\n".join(format_line(line, widths) for line in lines)


def format_line(cells: Sequence[str], widths: Sequence[int] = (14, 58, 12, 10, 12, 8)) -> str:
    """Return one line of the table."""
    padded = (
        f"{cell:>{width}}" if n == 2 else f"{cell:<{width}}" for n, (cell, width) in enumerate(_pairs(cells, widths))
    )
    return "  ".join(padded).rstrip()


def format_row(row: Row) -> str:
    """Format a single row, so that it can be printed before the table is complete."""
    return format_line((row.part, row.what, _shown(row.value), row.unit, row.bound, row.verdict))


def name_part(row: Row, part: str, seconds: float) -> Row:
    """Return the row with the name of its part."""
    return replace(row, part=part, seconds=round(seconds, 2))


def _pairs(cells: Sequence[str], widths: Sequence[int]) -> Iterable[tuple[str, int]]:
    return zip(cells, widths, strict=True)


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if math.isfinite(value) and value == int(value) and abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
