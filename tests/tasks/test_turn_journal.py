"""Tests of the journal of finished turns: what is recalled after a crash, and what waits for storage."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollflow.storage.errors import Corrupt, StoreFailed, Unreachable
from rollflow.storage.log.state import RunState
from rollflow.storage.model_input import ModelInput
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import GroupKey, StopReason
from rollflow.storage.run_records.episode_restarts import EpisodeRestart
from rollflow.storage.run_records.finished_turns import (
    EnvironmentSnapshot,
    EpisodeEvent,
    FinishedTurn,
    Record,
    TurnKey,
    decode_turns,
    encode_turns,
)
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.engines.base import Generation, GenerationRequest, TokenSpan
from rollflow.tasks.rollout.config import RolloutConfig
from rollflow.tasks.rollout.proxy import VersionedGeneration
from rollflow.tasks.rollout.resuming.files import TurnFiles
from rollflow.tasks.rollout.resuming.journal import OTHER_REQUEST, TurnFolder, TurnJournal, hash_request

KEY = TurnKey(GroupKey(3, 1), 2, 0)
INT32 = st.integers(0, (1 << 31) - 1)


def request(**changes: Any) -> GenerationRequest:
    """Return a request; `changes` replace fields of the request."""
    return replace(GenerationRequest("3.1.2", ModelInput.of((1, 2)), 8, 1.0, 7, stop=(">",)), **changes)


def made(ending: StopReason = StopReason.STOP) -> VersionedGeneration:
    """Return a generation of two tokens that began under version 4."""
    return VersionedGeneration(Generation("3.1.2", TokenSpan.of((5, 6), (-0.5, -1.5), (4, 5)), ending), 4)


class Folder(TurnFolder):
    """A folder in memory, whose writes wait for `gate` and fail with `error`."""

    def __init__(self) -> None:
        self.files: dict[str, list[Record]] = {}
        self.restarts: list[EpisodeRestart] = []
        self.gate, self.error = asyncio.Event(), None
        self.gate.set()

    error: Exception | None

    async def write(self, turns: Sequence[Record]) -> str:
        await self.gate.wait()
        if self.error:
            raise self.error
        path = f"turns/{len(self.files)}"
        self.files[path] = list(turns)
        return path

    async def note(self, restarts: Sequence[EpisodeRestart]) -> None:
        self.restarts += restarts

    async def delete(self, path: str) -> None:
        del self.files[path]


async def recorded(folder: Folder, keys: Sequence[TurnKey], **options: Any) -> TurnJournal:
    """Record one turn for each key, and return the journal after the turns are written."""
    journal = TurnJournal(folder, **options)
    writer = asyncio.create_task(journal.run())
    for key in keys:
        await journal.record(key, request(), made())
    while sum(map(len, folder.files.values())) < len(keys):
        await asyncio.sleep(0)
    writer.cancel()
    return journal


DIGEST = st.text("0123456789abcdef", max_size=32)
EVENT = st.one_of(
    st.builds(EpisodeEvent, st.just("turn"), DIGEST),
    st.builds(EpisodeEvent, st.just("add"), st.binary().map(lambda data: base64.b64encode(data).decode())),
    st.builds(EpisodeEvent, st.just("reward"), st.floats(allow_nan=False, allow_infinity=False)),
    st.builds(EpisodeEvent, st.just("enter_state"), st.integers(-(1 << 63), (1 << 63) - 1)),
    st.builds(EpisodeEvent, st.just("extend"), st.lists(st.dictionaries(st.text(), st.text(), max_size=2), max_size=2)),
)
SNAPSHOT = st.builds(
    EnvironmentSnapshot,
    st.builds(TurnKey, st.builds(GroupKey, INT32, INT32), INT32, INT32),
    INT32,
    DIGEST,
    DIGEST,
    st.lists(EVENT).map(tuple),
    st.binary(),
)
TURN = st.builds(
    lambda key, request, version, ending, rows: FinishedTurn(
        key,
        request,
        version,
        ending,
        Int32s.of([row[0] for row in rows]),
        Float32s.of([row[1] for row in rows]),
        Int32s.of([row[2] for row in rows]),
    ),
    st.builds(TurnKey, st.builds(GroupKey, INT32, INT32), INT32, INT32),
    st.text(),
    INT32,
    st.sampled_from(StopReason),
    st.lists(st.tuples(INT32, st.floats(width=32, allow_nan=False), INT32)),
)


@given(st.lists(TURN | SNAPSHOT))
def test_turns_in_the_journal_are_read_as_written(records: list[Record]) -> None:
    found = decode_turns(encode_turns(records))
    assert found == records
    assert [one.digest for one in found] == [one.digest for one in records]


@given(st.lists(TURN, min_size=1), st.data())
def test_changed_byte_of_a_turn_file_is_corrupt(turns: list[FinishedTurn], data: st.DataObject) -> None:
    content = bytearray(encode_turns(turns))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Corrupt):
        decode_turns(bytes(content))


async def test_same_request_recalls_the_stored_turn_once() -> None:
    folder = Folder()
    await recorded(folder, [KEY])
    after = TurnJournal(folder, folder.files)
    assert after.recall(KEY, request(id="another id")) == made()._replace(
        generation=replace(made().generation, id="another id"), is_recalled=True
    )
    assert after.recall(KEY, request()) is None
    assert (after.recalled, after.diverged) == (1, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": ModelInput.of((1, 3))},
        {"max_new_tokens": 7},
        {"temperature": 0.5},
        {"seed": 8},
        {"stop": ()},
    ],
    ids=str,
)
async def test_other_request_does_not_recall_the_turn(changes: dict[str, Any]) -> None:
    folder = Folder()
    await recorded(folder, [KEY])
    after = TurnJournal(folder, folder.files)
    assert after.recall(KEY, request(**changes)) is None
    assert (after.recalled, after.diverged) == (0, 1)
    assert after.recall(replace(KEY, turn=1), request()) is None
    assert after.diverged == 1  # later turns have other contexts, too
    assert [(one.turn, one.reason) for one in after._restarts] == [(0, OTHER_REQUEST)]


async def test_aborted_turn_is_not_stored() -> None:
    folder = Folder()
    journal = TurnJournal(folder, waits=True)
    await journal.record(KEY, request(), made(StopReason.ABORTED))
    await recorded(folder, [replace(KEY, turn=1)])
    assert [turn.key.turn for turns in folder.files.values() for turn in turns] == [1]


async def test_turn_is_returned_only_after_it_is_stored() -> None:
    folder = Folder()
    folder.gate.clear()
    journal = TurnJournal(folder, waits=True)
    writer = asyncio.create_task(journal.run())
    recording = asyncio.create_task(journal.record(KEY, request(), made()))
    await asyncio.sleep(0.05)
    assert not recording.done()
    folder.gate.set()
    await asyncio.wait_for(recording, 30)
    assert folder.files
    writer.cancel()


async def test_background_turn_does_not_wait_for_storage() -> None:
    folder = Folder()
    folder.gate.clear()
    journal = TurnJournal(folder)
    writer = asyncio.create_task(journal.run())
    await asyncio.wait_for(journal.record(KEY, request(), made()), 30)
    assert not folder.files
    writer.cancel()


async def test_failed_write_fails_only_waiting_turns() -> None:
    folder = Folder()
    folder.error = StoreFailed("the disk is full")
    journal = TurnJournal(folder, waits=True)
    writer = asyncio.create_task(journal.run())
    with pytest.raises(StoreFailed):
        await asyncio.wait_for(journal.record(KEY, request(), made()), 30)
    folder.error = None
    await asyncio.wait_for(journal.record(replace(KEY, turn=1), request(), made()), 30)
    assert [turn.key.turn for turns in folder.files.values() for turn in turns] == [1]
    writer.cancel()


async def test_waiting_turn_ends_when_the_journal_closes() -> None:
    folder = Folder()
    folder.gate.clear()
    journal = TurnJournal(folder, waits=True)
    writer = asyncio.create_task(journal.run())
    first = asyncio.create_task(journal.record(KEY, request(), made()))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(journal.record(replace(KEY, turn=1), request(), made()))
    await asyncio.sleep(0)
    writer.cancel()
    await asyncio.wait_for(asyncio.gather(first, second), 30)
    await asyncio.wait_for(journal.record(replace(KEY, turn=2), request(), made()), 30)


@given(st.sets(st.integers(0, 6)), st.integers(0, 7))
def test_turns_are_recalled_only_up_to_the_first_gap(stored: set[int], changed: int) -> None:
    """Turn `changed` has another request than before the crash."""
    keys = {number: replace(KEY, turn=number) for number in range(7)}
    turns = [replace(turn(KEY.group), key=keys[number], request=hash_request(request())) for number in sorted(stored)]
    journal = TurnJournal(Folder(), {"a": turns})
    asked = {number: request(seed=99) if number == changed else request() for number in keys}
    recalled = [number for number, key in keys.items() if journal.recall(key, asked[number])]
    first = next((number for number in keys if number not in stored or number == changed), 7)
    assert recalled == list(range(first))


async def test_failed_deletion_of_a_turn_file_is_ignored() -> None:
    class Away(Folder):
        async def delete(self, path: str) -> None:
            raise Unreachable("the store is away")

    journal = TurnJournal(Away(), {"turns/0": [turn(KEY.group)]})
    await journal.close_groups([KEY.group])


async def test_file_is_deleted_when_its_last_group_ends() -> None:
    folder = Folder()
    folder.gate.clear()
    journal = TurnJournal(folder)
    writer = asyncio.create_task(journal.run())
    other = GroupKey(9, 0)
    for key in (KEY, replace(KEY, group=other)):
        await journal.record(key, request(), made())
    folder.gate.set()
    while not folder.files:
        await asyncio.sleep(0.01)
    await journal.close_groups([KEY.group])
    assert len(folder.files) == 1
    await journal.close_groups([other])
    assert not folder.files
    writer.cancel()


def turn(group: GroupKey) -> FinishedTurn:
    """Return a finished turn of the group."""
    return FinishedTurn(
        replace(KEY, group=group), "r", 1, StopReason.STOP, Int32s.of((1,)), Float32s.of((-1.0,)), Int32s.of((1,))
    )


def test_turns_of_running_groups_are_kept_after_a_crash() -> None:
    running, ended, later = GroupKey(0, 1), GroupKey(1, 0), GroupKey(7, 0)
    state, store = RunState(issued=[2], filtered=[0], open={0: 1}), MemoryStore(uuid.uuid4().hex)
    store.put("turns/0000000001-0000000000.jsonl", encode_turns([turn(running), turn(ended), turn(later)]))
    store.put("turns/0000000001-0000000001.jsonl", encode_turns([turn(ended)]))
    store.put("turns/0000000001-0000000002.jsonl", b"damaged")
    journal = TurnFiles(store, 2).open_journal(RolloutConfig(), state)
    for group, is_kept in ((running, True), (ended, False), (later, True)):
        journal.recall(replace(KEY, group=group), request())
        assert journal.diverged == is_kept
        journal.diverged = 0
    assert list(store.list("turns")) == ["turns/0000000001-0000000000.jsonl"]
    TurnFiles(store, 2).open_journal(RolloutConfig(durable_turns="off"), state)
    assert not list(store.list("turns"))


async def test_new_scheduler_writes_its_own_turn_files() -> None:
    store = MemoryStore(uuid.uuid4().hex)
    for claim in (1, 2):
        files = TurnFiles(store, claim)
        for _ in range(2):
            await files.write([turn(KEY.group)])
    assert len(list(store.list("turns"))) == 4
