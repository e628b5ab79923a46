"""Compares the freshness limit, a lower bound on a run's time that depends on alpha, with an exhaustive search over
tiny schedules and with simulated runs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.tasks.policies.config import PolicyConfig
from rollflow.tasks.rollout.config import EvaluationConfig, RolloutConfig
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.simulation.bounds import earliest_publications
from rollflow.tasks.simulation.figures import Figures
from rollflow.tasks.simulation.hardware import Hardware
from rollflow.tasks.simulation.world import simulate

# --- an exhaustive search -----------------------------------------------------------------------------------


class Response(NamedTuple):
    """A response that runs or has ended: its length, the version under which it started, and the time left."""

    length: int
    version: int
    left: int


class Moment(NamedTuple):
    """The state of a run at a whole second."""

    version: int  # newest published policy version
    training: int  # seconds until the next version; 0 if the learner is idle
    batches: tuple[int, ...]  # the longest response of each batch so far
    waiting: tuple[int, ...]  # lengths of the responses that have not started
    started: tuple[Response, ...]


def choose(moment: Moment, size: int, alpha: int, slots: int, training: int) -> Iterator[Moment]:
    """List the states after all possible choices of a scheduler: which responses it starts, and which batch it trains,
    if any.
    """
    running = sum(response.left > 0 for response in moment.started)
    for count in range(min(len(moment.waiting), slots - running) + 1):
        for starts in set(itertools.combinations(moment.waiting, count)):
            new = [Response(length, moment.version, length) for length in starts]
            waiting = Counter(moment.waiting) - Counter(starts)
            state = moment._replace(
                waiting=tuple(sorted(waiting.elements())), started=tuple(sorted([*moment.started, *new]))
            )
            yield state
            if moment.training == 0:
                fresh = [one for one in moment.started if one.left == 0 and one.version >= moment.version - alpha]
                for batch in set(itertools.combinations(fresh, size)):
                    kept = Counter(state.started) - Counter(batch)
                    longest = max(response.length for response in batch)
                    yield state._replace(
                        training=training,
                        batches=(*moment.batches, longest),
                        started=tuple(sorted(kept.elements())),
                    )


def pass_second(moment: Moment) -> Moment:
    """Return the state one second later."""
    started = tuple(sorted(one._replace(left=max(0, one.left - 1)) for one in moment.started))
    published = moment.training == 1
    return moment._replace(version=moment.version + published, training=max(0, moment.training - 1), started=started)


def search(lengths: tuple[int, ...], size: int, alpha: int, slots: int, training: int) -> dict[tuple[int, ...], int]:
    """Try every schedule. Return the shortest time for each possible sequence of batches, named by the longest response
    of each batch.
    """
    last, found = len(lengths) // size, dict[tuple[int, ...], int]()
    moments = {Moment(0, 0, (), tuple(sorted(lengths)), ())}
    for now in range(sum(lengths) + last * training + 1):
        for moment in moments:
            if moment.version == last:
                found.setdefault(moment.batches, now)
        going = (moment for moment in moments if moment.version < last)
        moments = {pass_second(one) for moment in going for one in choose(moment, size, alpha, slots, training)}
    return found


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([(1, 3), (1, 4), (2, 2)]).flatmap(
        lambda sizes: st.tuples(
            st.just(sizes[0]),
            st.lists(st.integers(1, 3), min_size=sizes[0] * sizes[1], max_size=sizes[0] * sizes[1]),
        )
    ),
    st.integers(0, 2),
    st.integers(1, 2),
    st.integers(1, 2),
)
def test_freshness_limit_equals_the_best_of_all_schedules(
    drawn: tuple[int, list[int]], alpha: int, training: int, fewer: int
) -> None:
    size, lengths = drawn
    for batches, seconds in search(tuple(lengths), size, alpha, len(lengths), training).items():
        assert earliest_publications([0.0], batches, [training] * len(batches), alpha)[-1] == seconds
    for batches, seconds in search(tuple(lengths), size, alpha, fewer, training).items():
        assert earliest_publications([0.0], batches, [training] * len(batches), alpha)[-1] <= seconds


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=1, max_size=30),
    st.floats(0, 5),
    st.integers(1, 5),
)
def test_freshness_limit_is_at_least_the_mean_of_all_batches(
    batches: list[tuple[float, float]], alpha: float, given_times: int
) -> None:
    """The proof uses these inequalities, and the fact that every batch has to be trained."""
    published = [float(version) for version in range(given_times)]
    waits, trainings = [wait for wait, _ in batches], [training for _, training in batches]
    times = earliest_publications(published, waits, trainings, alpha)
    allowed, first = int(alpha), given_times - 1
    assert times[: first + 1] == published
    for number, (wait, training) in enumerate(batches, start=first):
        assert times[number + 1] >= times[max(0, number - allowed)] + wait + training
        assert times[number + 1] >= times[number] + training
    windows = [times[number + 1] - times[max(0, number - allowed)] for number in range(first, len(times) - 1)]
    steps = (allowed + 1) * (times[-1] - times[max(0, first - allowed)])
    assert steps >= sum(windows) - 1e-6 >= sum(map(sum, batches)) - 2e-6


# --- simulated runs -----------------------------------------------------------------------------------------


def figures_of_run(alpha: float, slots: int, *, groups: int = 4, rollout: dict[str, Any], **sections: Any) -> Figures:
    """Simulate a small run, and return the measured numbers."""
    config = RunConfig(
        versions=10,
        groups=groups,
        group_size=2,
        async_ratio=alpha,
        policy=PolicyConfig(path="x"),
        rollout=RolloutConfig(**rollout),
        evaluation=EvaluationConfig(every=0),
    )
    keys: dict[str, Any] = {
        "engines": {"count": 2, "max_concurrent_requests": slots, "seconds_per_token": 0.1, "speeds": (1.0, 1.5)},
        "responses": {"median": 100.0, "sigma": 1.0, "cap": 1000, "tokens_per_tick": 1},
    }
    return simulate(config, Hardware.model_validate(keys | sections)).figures


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]),
    st.integers(1, 40),
    st.sampled_from([{}, {"on_stale": "drop"}, {"redundant_groups": 2}, {"batch_order": "started"}]),
    st.floats(0.0, 60.0),
    st.floats(0.0, 10.0),
    st.floats(0.0, 5.0),
)
def test_no_simulated_run_is_faster_than_its_freshness_limit(
    alpha: float, slots: int, rollout: dict[str, Any], training: float, score: float, update: float
) -> None:
    figures = figures_of_run(
        alpha,
        slots,
        rollout=rollout,
        learner={"seconds_per_version": training},
        reward={"seconds": score},
        update={"seconds": update, "fetch_seconds": update / 2},
    )
    assert figures.step_seconds >= figures.freshness_limit * (1 - 1e-9)


@pytest.mark.parametrize(("alpha", "steps"), [(0.0, 1), (1.0, 2), (3.0, 4)])
def test_run_with_enough_slots_reaches_its_freshness_limit(alpha: float, steps: int) -> None:
    """Each response takes 50 s and its score 2 s; an update takes 3 s, and training 5 s."""
    figures = figures_of_run(
        alpha,
        64,
        rollout={"max_batches_ahead": alpha},
        engines={"count": 1, "max_concurrent_requests": 64, "seconds_per_token": 0.1},
        responses={"median": 500.0, "sigma": 0.0, "cap": 1000, "tokens_per_tick": 1},
        learner={"seconds_per_version": 5.0},
        reward={"seconds": 2.0},
        update={"seconds": 3.0},
    )
    if not alpha:
        assert figures.step_seconds == pytest.approx(60.0, rel=1e-3)
    assert figures.freshness_limit == pytest.approx(60.0 / steps, rel=0.3)
    assert figures.freshness_limit <= figures.step_seconds
