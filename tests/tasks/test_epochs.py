"""Tests of epochs that skip solved questions: what is skipped, and what a restarted process reads."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.errors import Corrupt
from rollflow.storage.log.entries import BatchCommitted, BatchVoided, EpochStarted, TrainedGroup, VersionPublished
from rollflow.storage.log.run_log import Log
from rollflow.storage.log.state import Deposed, EntryRefused, EpochPlace
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.records import Discard, DiscardReason, GroupKey, PassRate, StoredObject
from rollflow.tasks.prompts.config import FilePrompts
from rollflow.tasks.prompts.epochs import Epochs, SkipRule, list_asked
from tests.support.counts import examples
from tests.support.described import describe
from tests.support.epoch_rules import Questions
from tests.support.log_drawn import BODY
from tests.support.log_model import read_log
from tests.support.log_runs import of_kind

FILE = StoredObject("made/up", 1, "0")
SIZE = 2


class Source:
    """A run with one prompt source of some questions, its log, and the scheduler's epochs."""

    def __init__(self, questions: int = 4, every: int = 2, **keys: float) -> None:
        self.store = MemoryStore(uuid.uuid4().hex)
        self.config = FilePrompts(path="q.jsonl", solved_every=every, **keys)  # type: ignore[arg-type]
        config = {"prompts": [self.config.model_dump(mode="json")], "group_size": SIZE, "async_ratio": 9}
        describe(self.store, config=config)
        Log(self.store).claim("supervisor")
        self.questions, self.number, self.issued = Questions(questions, 0), 0, 0
        Log(self.store).claim("learner").append(lambda state, _: VersionPublished(0, None, (FILE,), (FILE,)))
        self.restart()

    def restart(self) -> None:
        """Read the log in a new scheduler."""
        self.log = Log(self.store)
        self.writer = self.log.claim("scheduler")
        self.epochs = Epochs(self.log, [self.config], [self.questions])

    def start(self) -> EpochStarted:
        """Start the epoch of the next prompt, and return its entry."""
        self.epochs.start(self.writer, 0, self.issued)
        return self.newest

    @property
    def newest(self) -> EpochStarted:
        """The log entry of the newest epoch."""
        found = self.log.read(self.log.state.epochs[0].entry)
        assert found is not None
        assert isinstance(found.entry.body, EpochStarted)
        return found.entry.body

    def question(self, position: int) -> int:
        """Return the question that the prompt at a position asks."""
        epoch, place = divmod(self.epochs.locate(0, position), self.questions.count)
        return self.questions.order(epoch)[place]

    def commit(self, correct: Mapping[int, int], filtered: Sequence[int] = (), rated: bool = True) -> int:
        """Issue prompts and commit them, and return the number of the log entry. `correct` maps prompts to numbers of
        correct responses.
        """
        prompts = range(self.issued, max(correct) + 1)
        self.issued = max(correct) + 1
        groups = tuple(TrainedGroup(one, 0, 0, 0, 7) for one in prompts if one not in filtered)
        gone = tuple(Discard(GroupKey(one, 0), DiscardReason.FILTERED, 0, 7) for one in filtered)
        rates = tuple(PassRate(one, count, SIZE) for one, count in correct.items()) if rated else ()
        body = BatchCommitted(self.number, FILE, SIZE * len(groups), groups, tuple(prompts), gone, rates=rates)
        self.number += 1
        return self.writer.append(lambda state, _: body).n


def refused_by_model(run: Source, body: EpochStarted | BatchCommitted) -> str:
    """Return why the simple model of the log, `read_log`, refuses an entry; "" if it accepts the entry."""
    return read_log(run.store).why_not("scheduler", run.writer.claim, BODY.dump_python(body, mode="json"))


def test_first_epoch_over_a_file_asks_every_question() -> None:
    run = Source(5)
    assert run.start() == EpochStarted(0, 0, 0, 5)
    assert [run.question(position) for position in range(5)] == run.questions.order(0)


def test_solved_questions_are_asked_in_every_nth_epoch() -> None:
    run = Source(4, every=2)
    run.start()
    run.commit(dict.fromkeys(range(4), SIZE))
    second = run.start()
    assert (second.number, second.start, second.asked, second.skipped) == (1, 4, 2, (0, 2))
    assert {run.question(position) for position in (4, 5)} == {1, 3}
    run.commit({4: 0, 5: SIZE})  # the first of them is no longer solved
    unsolved, solved = run.question(4), run.question(5)
    third = run.start()
    assert third.skipped == (solved,)
    assert {run.question(position) for position in range(third.start, third.end)} == {0, 2, unsolved}


@pytest.mark.parametrize(
    ("solved_from", "correct", "skipped"), [(1.0, 1, ()), (0.5, 1, (0,)), (0.6, 1, ()), (1.0, 2, (0,))]
)
def test_key_solved_from_decides_which_questions_are_solved(
    solved_from: float, correct: int, skipped: tuple[int, ...]
) -> None:
    run = Source(1, solved_from=solved_from)
    run.start()
    run.commit({0: correct})
    run.epochs.start(run.writer, 0, 1)
    epochs = [entry.body for entry in of_kind(run.store, EpochStarted)]
    assert isinstance(epochs[1], EpochStarted)
    assert epochs[1].skipped == skipped


def test_epoch_without_questions_to_ask_is_skipped() -> None:
    run = Source(1, every=3)
    run.start()
    run.commit({0: SIZE})
    newest = run.start()
    assert (newest.number, newest.start, newest.asked) == (3, 1, 1)
    assert run.question(1) == 0


def test_only_questions_with_a_pass_rate_count_as_solved() -> None:
    run = Source(4, every=9)
    run.start()
    run.commit({0: SIZE, 1: SIZE, 3: 0}, filtered=[1])
    assert set(run.start().skipped) == {one for one in (run.question(0), run.question(1)) if (one + 1) % 9}
    other = Source(4, every=9)
    other.start()
    other.commit(dict.fromkeys(range(4), SIZE), rated=False)
    assert other.start().skipped == ()


def test_question_without_finished_responses_is_not_solved() -> None:
    run = Source(4, every=9)
    run.start()
    run.commit({0: SIZE})
    assert run.epochs.start(run.writer, 0, 4) == run.newest.end
    assert run.newest.skipped == (run.question(0),)


def test_pass_rates_of_voided_batches_are_ignored() -> None:
    run = Source(4, every=9)
    run.start()
    entry = run.commit(dict.fromkeys(range(4), SIZE))
    run.writer.append(lambda state, _: BatchVoided(0, entry, "damaged"))
    assert run.start().skipped == ()


def test_restarted_scheduler_asks_the_same_questions() -> None:
    run = Source(6, every=3)
    run.start()
    run.commit(dict.fromkeys(range(6), SIZE))
    newest = run.start()
    before = [run.question(position) for position in range(newest.end)]
    run.restart()
    assert run.start() == newest, "the epoch is on record, and is not started again"
    assert [run.question(position) for position in range(newest.end)] == before


def test_two_racing_schedulers_start_an_epoch_once() -> None:
    run = Source(3, every=2)
    run.start()
    late = Epochs(run.log, [run.config], [run.questions])
    assert late.start(run.writer, 0, 0) == 3
    assert run.log.state.epochs[0].number == 0


def test_replaced_scheduler_starts_no_epoch() -> None:
    run = Source(3)
    old = run.writer
    run.restart()
    with pytest.raises(Deposed):
        Epochs(old.log, [run.config], [run.questions]).start(old, 0, 0)
    assert Log(run.store).state.epochs == {0: EpochPlace()}


def test_prompt_outside_of_all_epochs_is_refused() -> None:
    run = Source(3)
    run.start()
    with pytest.raises(Corrupt, match="prompt 3 of prompt source 0 belongs to no epoch"):
        run.epochs.locate(0, 3)


def test_prompt_beyond_the_newest_epoch_is_refused() -> None:
    run = Source(3)
    run.start()
    with pytest.raises(
        EntryRefused, match="prompt 3 cannot be issued yet, because it is beyond the newest epoch of source 0"
    ):
        run.commit(dict.fromkeys(range(4), 0))
    body = BatchCommitted(0, FILE, SIZE, (TrainedGroup(3, 0, 0, 0, 7),), (0, 1, 2, 3))
    assert refused_by_model(run, body) == "beyond the epochs of its source"


@pytest.mark.parametrize(
    "change",
    [
        {"number": 2},
        {"start": 2},
        {"before": None},
        {"asked": 2},
        {"skipped": (1, 0), "asked": 1},
        {"skipped": (0, 0), "asked": 1},
        {"skipped": (3,), "asked": 2},
        {"asked": -1, "skipped": (0, 1, 2)},
        {"source": 1},
    ],
)
def test_epoch_that_contradicts_the_log_is_refused(change: Mapping[str, object]) -> None:
    run = Source(3)
    run.start()
    body = replace(EpochStarted(0, 1, 3, 3, (), run.log.state.epochs[0].entry), **change)  # type: ignore[arg-type]
    with pytest.raises(EntryRefused):
        run.writer.append(lambda state, _: body)
    assert refused_by_model(run, body)


@pytest.mark.parametrize("rates", [[(7, 1, SIZE)], [(0, 3, SIZE)], [(0, -1, SIZE)], [(0, 1, 1)], [(0, 1, SIZE)] * 2])
def test_impossible_pass_rates_are_refused(rates: list[tuple[int, int, int]]) -> None:
    run = Source(3)
    run.start()
    told = tuple(PassRate(*rate) for rate in rates)
    body = BatchCommitted(0, FILE, SIZE, (TrainedGroup(0, 0, 0, 0, 7),), (0,), rates=told)
    with pytest.raises(EntryRefused, match="pass rates that are not those of its groups"):
        run.writer.append(lambda state, _: body)
    assert "pass rate" in refused_by_model(run, body)


@settings(max_examples=examples(200), deadline=None)
@given(
    every=st.integers(2, 5),
    questions=st.integers(1, 9),
    passes=st.lists(st.sets(st.integers(0, 8)), min_size=1, max_size=12),
)
def test_every_solved_question_is_asked_again_later(every: int, questions: int, passes: list[set[int]]) -> None:
    rule, solved, skipped_in = SkipRule(every, 1.0), set[int](), [0] * questions
    for number, passed in enumerate(passes):
        skipped = set(rule.choose_skipped(number, solved))
        asked = {range(questions)[place] for place in list_asked(range(questions), skipped)}
        assert asked | skipped == set(range(questions))
        assert not asked & skipped
        skipped_in = [skipped_in[one] + 1 if one in skipped else 0 for one in range(questions)]
        assert max(skipped_in) < every
        solved = skipped | (asked & passed)
