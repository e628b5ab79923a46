"""Tests `benchmarks.gpu` without a GPU: how it handles parts that fail, hang or crash, and what it imports.

`tests/test_benchmarks.py` runs all parts at a small size.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu_rows import ERROR, FAILED, OK, Row, check_at_least, check_at_most, format_rows, guard
from tests.support.waiting import RUN_SECONDS

ROOT = Path(__file__).parents[1]
CHILD = """
import json, os, sys, time
print("READY", "gpu", flush=True)
limit, name = sys.stdin.readline().split()
print("ROW", json.dumps({"what": name, "value": 1.0, "part": name}), flush=True)
if name == "hangs":
    time.sleep(600)
if name == "dies":
    print("device-side assert", flush=True)
    os._exit(3)
print("DONE", name, flush=True)
"""
IMPORTS = """
import sys
sys.path = [path for path in sys.path if not path.endswith(".dev")]
from benchmarks import gpu
gpu.map_package()
import importlib, rollflow.storage.errors
assert not rollflow.storage.errors.__file__.startswith(sys.prefix)
for module, _ in gpu.PARTS.values():
    importlib.import_module(f"benchmarks.{module}")
heavy = {"ray", "prefect", "vllm", "mlflow", "s3fs", "deepspeed"} & set(sys.modules)
assert not heavy, heavy
"""


def run_kit(monkeypatch: pytest.MonkeyPatch, parts: list[str], file: Path | None = None) -> list[Row]:
    monkeypatch.setattr(gpu.Child, "command", [sys.executable, "-c", CHILD])
    monkeypatch.setattr(gpu, "PARTS", dict.fromkeys(parts, ("", 6)))
    kit = gpu.Kit("", 60.0, file)
    kit.run(parts)
    return kit.rows


def test_gpu_check_continues_after_a_crashed_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = run_kit(monkeypatch, ["dies", "sound"], tmp_path / "rows.json")
    assert [(row.part, row.verdict) for row in rows] == [("dies", ""), ("dies", ERROR), ("sound", "")]
    assert "device-side assert" in str(rows[1].value)
    assert [row["part"] for row in json.loads((tmp_path / "rows.json").read_text())] == ["dies", "dies", "sound"]


@pytest.mark.long
def test_hanging_gpu_check_part_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run_kit(monkeypatch, ["hangs", "sound"])
    assert [(row.part, row.verdict) for row in rows] == [("hangs", ""), ("hangs", ERROR), ("sound", "")]


def test_gpu_check_part_that_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu.Child, "command", [sys.executable, "-c", "print('no torch'); raise SystemExit(1)"])
    kit = gpu.Kit("", 60.0, None)
    kit.run(["card"])
    assert [row.verdict for row in kit.rows] == [ERROR]


def test_gpu_check_continues_after_a_failed_case() -> None:
    def cases() -> Iterator[Row]:
        yield from guard("first", broken)
        yield from guard("second", lambda: [check_at_most("x", 1.0, 2.0)])

    def broken() -> Iterator[Row]:
        yield check_at_least("y", 3.0, 2.0)
        raise RuntimeError("out of memory")

    assert [(row.what, row.verdict) for row in cases()] == [("y", OK), ("first", ERROR), ("x", OK)]


@pytest.mark.parametrize("value", [math.nan, math.inf, 2.1])
def test_gpu_check_row_above_its_limit_fails(value: float) -> None:
    row = check_at_most("x", value, 2.0)
    assert row.verdict == FAILED
    assert FAILED in format_rows([row])


@pytest.mark.long
def test_gpu_kit_imports_no_server_and_needs_no_install() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS
    )
    assert done.returncode == 0, done.stderr
