"""Keeps the finished turns of running episodes in storage, so that an episode survives the death of its scheduler.

    engine --> turn --> journal --+--> file: all turns that finished since the last file, in the background
                                  +--> environment, which acts and asks for the next turn

    after a crash: the environment plays the episode again from its start. Each stored turn is recalled instead of
    generated, until the first turn that is not stored.

- A turn is recalled only for the same request: the same context, token limit, stop strings, temperature and seed. If
  an environment answers differently than before the crash, the contexts differ, and the policy generates anew.
- With `durable_turns = "before-action"`, the environment gets a turn only after the turn is stored. So no action is
  repeated with another turn, and a crash loses only running generations.
- With `durable_turns = "background"`, nothing waits for storage. A crash also loses the turns of the last moment.
- A file is deleted as soon as each of its groups is in a batch or discarded.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from rollflow.storage.errors import StoreFailed, Unreachable
from rollflow.storage.records import GroupKey, StopReason
from rollflow.storage.run_records.finished_turns import FinishedTurn, TurnKey
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.rollout.proxy import VersionedGeneration

WRITE_SECONDS = 0.1  # shortest time between the starts of two writes


class TurnFolder(Protocol):
    """The place where a journal stores turns."""

    async def write(self, turns: Sequence[FinishedTurn]) -> str:
        """Store the turns in a new file, and return the file's path.

        Raises:
            StoreFailed, Unreachable: the turns may not be stored.
        """

    async def delete(self, path: str) -> None:
        """Delete a file."""


class TurnJournal:
    """The stored turns of one scheduler's episodes. See the module's docstring. A journal without a folder stores
    nothing.

    `stored` are the files of earlier schedulers, by path. If `waits` is True, `record` waits until the turn is stored.
    """

    def __init__(
        self,
        folder: TurnFolder | None = None,
        stored: Mapping[str, Sequence[FinishedTurn]] | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self._folder, self._waits = folder, waits
        self.recalled = 0  # number of turns that were recalled
        self.diverged = 0  # number of turns that were not recalled because the request differs
        self._known: dict[TurnKey, FinishedTurn] = {}
        self._files: dict[str, set[GroupKey]] = {}  # path -> groups of the file that have not ended
        self._pending: list[FinishedTurn] = []
        self._news = asyncio.Event()
        self._written: asyncio.Future[None] | None = None  # done once the pending turns are stored
        for path, turns in (stored or {}).items():
            self._known |= {turn.key: turn for turn in turns}
            self._files[path] = {turn.key.group for turn in turns}

    def recall(self, key: TurnKey, request: GenerationRequest) -> VersionedGeneration | None:
        """Return the stored turn if it answers the same request, else None."""
        turn = self._known.pop(key, None)
        if turn is None:
            return None
        if turn.request != hash_request(request):
            self.diverged += 1
            return None
        self.recalled += 1
        span = TokenSpan(turn.tokens, turn.logprobs, turn.versions)
        return VersionedGeneration(Generation(request.id, span, turn.ending), turn.started_version, is_recalled=True)

    async def record(self, key: TurnKey, request: GenerationRequest, made: VersionedGeneration) -> None:
        """Store a finished turn. An aborted generation is not stored.

        Raises:
            StoreFailed, Unreachable: `waits` is True, and the turn cannot be stored.
        """
        generation = made.generation
        if self._folder is None or generation.ending is StopReason.ABORTED:
            return
        self._pending.append(
            FinishedTurn(
                key,
                hash_request(request),
                made.version,
                generation.ending,
                generation.tokens,
                generation.logprobs,
                generation.versions,
            )
        )
        self._news.set()
        if self._waits:
            self._written = self._written or asyncio.get_running_loop().create_future()
            await asyncio.shield(self._written)

    async def run(self) -> None:
        """Write the recorded turns, one file after another, until the task is cancelled; then nothing waits."""
        try:
            while self._folder is not None:
                await self._news.wait()
                self._news.clear()
                await self._write_pending(self._folder)
                await asyncio.sleep(WRITE_SECONDS)
        finally:
            self._folder = None
            self._finish(self._written)

    async def _write_pending(self, folder: TurnFolder) -> None:
        turns, written = self._pending, self._written
        self._pending, self._written = [], None
        failed: Exception | None = None
        try:
            self._files[await folder.write(turns)] = {turn.key.group for turn in turns}
        except (StoreFailed, Unreachable) as error:
            failed = error  # if nothing waits for these turns, they are only generated again after a crash
        finally:
            self._finish(written, failed)

    def _finish(self, written: asyncio.Future[None] | None, failed: Exception | None = None) -> None:
        if written is None or written.done():
            return
        if failed is None:
            written.set_result(None)
        else:
            written.set_exception(failed)

    async def close_groups(self, groups: Iterable[GroupKey]) -> None:
        """Delete the files in which every group has ended; the groups `groups` have ended now."""
        ended = set(groups)
        for path, running in list(self._files.items()):
            running -= ended
            if not running and self._folder is not None:
                del self._files[path]
                await self._folder.delete(path)


def hash_request(request: GenerationRequest) -> str:
    """Return a hash of all that decides a generation, except for the weights: the context, the limits and the seed."""
    prompt = request.prompt
    options = (request.max_new_tokens, request.temperature, request.seed, request.stop, prompt.placed)
    digest = hashlib.blake2b(repr(options).encode(), digest_size=16)
    digest.update(prompt.flat.data)
    return digest.hexdigest()
