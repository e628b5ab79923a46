"""Reads the newest responses of a run, with their prompts, from the run's committed batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pyarrow as pa

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import BatchCommitted
from rollflow.storage.log.reading import get_entry
from rollflow.storage.trajectories import TrajectoryStore

TOKEN = np.dtype(np.int32)


class RecentResponses:
    """Reads the responses of the batches that were committed since the last read, up to a limit on the number of
    tokens.
    """

    def __init__(self, batches: TrajectoryStore, most_tokens: int) -> None:
        self._batches, self._most = batches, most_tokens
        self._next = 0  # number of the first log entry that was not read

    def read(self) -> list[tuple[bytes, bytes]]:
        """Return pairs of a prompt and its response, both as the bytes of 32-bit token ids, the oldest batch first.

        Batches are read from the newest to the oldest, until their responses reach the limit on the number of tokens. A
        batch whose file cannot be read is left out.
        """
        log = self._batches.log
        log.follow()
        first, last = self._next, log.state.n
        found: list[list[tuple[bytes, bytes]]] = []
        tokens = 0
        for number in range(last, first - 1, -1):
            body = get_entry(log, number).entry.body
            if not isinstance(body, BatchCommitted):
                continue
            with suppress(Corrupt):
                rows = list(list_responses(TrajectoryBatch.from_bytes(self._batches.read(body.file))))
                tokens += sum(len(prompt) + len(rest) for prompt, rest in rows) // TOKEN.itemsize
                found.append(rows)
            if tokens >= self._most:
                break
        self._next = last + 1
        return [row for rows in reversed(found) for row in rows]


def list_responses(batch: TrajectoryBatch) -> Iterator[tuple[bytes, bytes]]:
    """Yield the prompt of each trajectory and the tokens from the first sampled token on, both as the bytes of 32-bit
    token ids.

    Trajectories with parts that are not tokens, such as images, are left out.
    """
    column = _combine(batch.table["tokens"])
    masks = _combine(batch.table["loss_mask"])
    tokens = column.values.to_numpy(zero_copy_only=False).astype(TOKEN, copy=False)
    sampled = masks.values.to_numpy(zero_copy_only=False)
    ends = column.offsets.to_numpy()
    for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        own = sampled[start:end]
        if own.any() and tokens[start:end].min() >= 0:
            first = start + int(own.argmax())
            yield tokens[start:first].tobytes(), tokens[first:end].tobytes()


def _combine(column: pa.ChunkedArray) -> pa.ListArray:
    found = column.combine_chunks()
    return found.chunk(0) if isinstance(found, pa.ChunkedArray) else found
