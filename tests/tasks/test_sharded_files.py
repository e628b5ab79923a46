"""Tests weight files that are gathered from all ranks: one file is gathered at a time and again for each request, and
listing the names gathers nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import pytest

from rollflow.tasks.learners.checkpoint.sharded_files import GatheredFiles


def test_sharded_tensors_are_gathered_one_file_at_a_time() -> None:
    made: list[str] = []
    together = Barrier(2)

    def gather(name: str) -> bytes:
        with pytest.raises(BrokenBarrierError):
            together.wait(0.05)  # a second call of `gather` at the same time would end this wait
        together.reset()
        made.append(name)
        return name.encode()

    files = GatheredFiles("abcd", gather)
    assert (list(files), len(files), made) == (["a", "b", "c", "d"], 4, [])
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(files.__getitem__, "abcd")) == [b"a", b"b", b"c", b"d"]
    assert sorted(made) == ["a", "b", "c", "d"]
    assert files["a"] == b"a"
    assert made.count("a") == 2
    with pytest.raises(KeyError):
        files["e"]
