"""The publish barrier: no learner rank changes a tensor before the first rank has published it. Here ranks are
threads.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from rollflow.storage.errors import StoreFailed
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.distributed import publish_barrier
from rollflow.tasks.learners.distributed.gloo_ranks import GlooRanks
from rollflow.tasks.learners.distributed.publish_barrier import (
    BarrierMessage,
    StepStopped,
    follow_first_rank,
    wait_published,
)
from rollflow.tasks.learners.distributed.ranks import Ranks
from rollflow.testing.learners import batch, saved
from tests.support.rank_threads import on_ranks
from tests.support.tiny_policy import make_policy, make_weights
from tests.support.waiting import HANG_SECONDS
from tests.tasks.test_ranks import begun


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_weights(make_policy(tmp_path_factory.mktemp("policy")), seed=1)


def settle_of(ranks: Ranks, settle: Any) -> Any:
    """Return the `settle` argument of a rank's step."""
    assert isinstance(ranks, GlooRanks)
    return partial(wait_published, ranks, settle) if ranks.rank == 0 else partial(follow_first_rank, ranks)


def test_no_rank_changes_tensors_before_they_are_stored(folder: Path) -> None:
    stored = Event()

    def work(ranks: Ranks) -> tuple[bool, bool]:
        made = begun(folder, TorchTrain(minibatches=2), ranks)
        before, apply, when = saved(made), made.policy.apply, list[bool]()
        made.policy.apply = lambda: (when.append(stored.is_set()), apply())  # type: ignore[method-assign,func-returns-value]
        made.step(batch(0), 0, settle_of(ranks, lambda: (time.sleep(0.2), stored.set())))
        return when == [True, True], saved(made) != before

    assert on_ranks(3, work) == [(True, True)] * 3


def test_failed_write_of_weights_ends_the_step_on_all_ranks(folder: Path) -> None:
    error = StoreFailed("the store is full")

    def full() -> None:
        raise error

    def work(ranks: Ranks) -> BaseException | None:
        made, quiet = (begun(folder, TorchTrain(), ranks) for _ in range(2))
        ranks.add(torch.zeros(1))  # wait until all learners exist: each seeds the generator that the threads share
        before = saved(made)
        with pytest.raises(StepStopped) as caught:
            made.step(batch(0), 0, settle_of(ranks, full))
        assert saved(made) == before
        for one in (made, quiet):
            one.step(batch(1), 0)
        assert saved(made) == saved(quiet)
        return caught.value.error

    assert on_ranks(2, work) == [error, None]


def test_learner_ranks_wait_for_a_slow_store_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is slow, rank 0 repeats a message, so that the other ranks do not time out. Here the store waits
    for the third message.
    """
    heard, third, say = list[BarrierMessage](), Event(), publish_barrier._broadcast_word

    def hear(ranks: GlooRanks, word: BarrierMessage = BarrierMessage.WAIT) -> BarrierMessage:
        word = say(ranks, word)
        if ranks.rank:
            heard.append(word)
        if len(heard) == 3:
            third.set()
        return word

    def slow() -> None:
        assert third.wait(HANG_SECONDS), "no message was sent"

    monkeypatch.setattr(publish_barrier, "_broadcast_word", hear)
    monkeypatch.setattr(publish_barrier, "TIMES", 1000)
    on_ranks(2, lambda ranks: settle_of(ranks, slow)())
    assert heard[:3] == [BarrierMessage.WAIT] * 3
    assert heard[-1] == BarrierMessage.GO_ON
