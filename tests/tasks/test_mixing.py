"""Tests the mixing of prompt sources: each source gets its share of the trained groups, despite filters, slow sources
and crashes.
"""

from __future__ import annotations

import random
import uuid
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.report import AuditReport
from rollflow.storage.errors import ConfigError
from rollflow.storage.log.entries import TrainedGroup
from rollflow.storage.log.run_log import Log
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.policies import PolicyStore
from rollflow.storage.records import Cursor, TrajectoryGroup
from rollflow.storage.trajectories import TrajectoryStore
from rollflow.tasks.engines.base import Generation, GenerationRequest
from rollflow.tasks.engines.config import TimedEngineConfig
from rollflow.tasks.engines.lengths import ResponseLengths
from rollflow.tasks.engines.timed import TimedEngine
from rollflow.tasks.rollout.mixing import Mixture, Slots
from rollflow.tasks.rollout.scheduler import RolloutScheduler
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.runtime.clock import run_virtual
from tests.support.counts import examples
from tests.support.pipeline import Damage, Pipeline
from tests.tasks.test_scheduler import stopped

SHARES = st.lists(st.integers(1, 9999).map(lambda n: n / 1000), min_size=1, max_size=6)
MEDIAN = 16.0  # tokens
MIXED = (0.5, 0.3, 0.2)
SLOW, FILTERED = 1, 2  # sources


def drawn(mixture: Mixture, count: int) -> list[int]:
    return [mixture.next() for _ in range(count)]


def sources(indices: Sequence[int], count: int) -> list[int]:
    return [index % count for index in indices]


# --- the mixture alone --------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0.01, 100), st.integers(0, 50))
def test_prompts_of_a_single_source_are_issued_in_order(share: float, filtered: int) -> None:
    mixture = Mixture((share,))
    for index in range(filtered):
        mixture.note_filtered(index)
    assert drawn(mixture, 20) == list(range(20))


def test_prompt_mixture_of_three_to_one_matches_a_hand_example() -> None:
    mixture = Mixture((3, 1))
    assert drawn(mixture, 8) == [0, 2, 1, 4, 6, 8, 3, 10]  # a a b a: source 0 has the even indices, source 1 the odd
    mixture.note_filtered(2)
    mixture.note_filtered(1)
    mixture.note_filtered(3)
    assert drawn(mixture, 4) == [5, 7, 12, 14]  # two replacements from source 1, one from source 0, then the next slot
    assert mixture.state == Cursor((8, 4), (1, 2))


@pytest.mark.parametrize(
    ("shares", "order"),
    [
        ((1, 1, 1), "012012"),
        ((0.5, 0.25, 0.25), "01020102"),
        ((0.1, 0.1, 0.1), "012012"),
        ((2, 6), "10111011"),
        ((2, 1), "010010"),
        ((1, 5), "110111110111"),  # the rare source comes as soon as it would not exceed its share
    ],
)
def test_prompts_of_all_sources_are_interleaved_evenly(shares: tuple[float, ...], order: str) -> None:
    made = drawn(Mixture(shares), len(order))
    assert "".join(map(str, sources(made, len(shares)))) == order


@settings(deadline=None)
@given(SHARES, st.integers(1, 300))
def test_every_prefix_of_the_mixture_has_the_configured_shares(shares: list[float], count: int) -> None:
    slots, filled, total = Slots(shares), [0] * len(shares), sum(shares)
    for number in range(1, count + 1):
        filled[slots.first_free(filled)] += 1
        for source, share in enumerate(shares):
            assert abs(filled[source] - number * share / total) < 1


def test_prompt_source_with_a_tiny_share_is_not_drawn_early() -> None:
    made = drawn(Mixture((1e9, 1.0)), 100)
    assert made == list(range(0, 200, 2))


@settings(deadline=None)
@given(SHARES, st.lists(st.integers(0, 9), max_size=200), st.randoms(use_true_random=False))
def test_filtered_prompts_are_replaced_from_the_same_source(
    shares: list[float], steps: list[int], draw: random.Random
) -> None:
    """At any moment, the groups that were not filtered follow the unfiltered order, except for slots that still wait
    for a replacement.
    """
    mixture, unfiltered, flying = Mixture(shares), Slots(shares), list[int]()
    opened = [0] * len(shares)  # number of slots of each source that were filled at least once
    for step in steps:
        if step < 4 and flying:
            mixture.note_filtered(flying.pop(draw.randrange(len(flying))))
            continue
        kept = kept_of(mixture)
        owed = any(have < slots for have, slots in zip(kept, opened, strict=True))
        source = mixture.next() % len(shares)
        flying.append(mixture.state.upcoming[source] - len(shares))
        if owed:
            assert kept[source] < opened[source]  # the replacement comes from a source that has lost a group
        else:
            assert source == unfiltered.first_free(kept)
            opened[source] += 1
    for _ in range(sum(opened) - sum(kept_of(mixture))):
        mixture.next()
    assert kept_of(mixture) == opened
    total = sum(opened)
    assert all(abs(have - total * s / sum(shares)) < 1 for have, s in zip(kept_of(mixture), shares, strict=True))


def kept_of(mixture: Mixture) -> list[int]:
    state = mixture.state
    return [issued - gone for issued, gone in zip(state.issued, state.filtered, strict=True)]


@settings(deadline=None)
@given(SHARES, st.lists(st.booleans(), max_size=100), st.integers(0, 100))
def test_prompt_mixture_continues_from_its_cursor(shares: list[float], filtering: list[bool], more: int) -> None:
    mixture = Mixture(shares)
    for filtered in filtering:
        index = mixture.next()
        if filtered:
            mixture.note_filtered(index)
    state = mixture.state
    again = Mixture(shares, state.issued, state.filtered)
    assert again.state == state
    assert drawn(again, more) == drawn(mixture, more)


@settings(deadline=None)
@given(SHARES, st.integers(1, 60), st.integers(0, 1000), st.integers(1, 20), st.randoms(use_true_random=False))
def test_prompt_mixture_does_not_depend_on_completion_order(
    shares: list[float], count: int, seed: int, depth: int, draw: random.Random
) -> None:
    """The same groups are filtered at different moments, and the mixture is the same. So runs at alpha = 0 can be
    reproduced.
    """

    def filled(depth: int) -> tuple[Cursor, set[int]]:
        mixture, flying, kept = Mixture(shares), list[int](), set[int]()
        while len(kept) < count:
            while len(flying) < depth and len(flying) + len(kept) < count:
                flying.append(mixture.next())
            index = flying.pop(draw.randrange(len(flying)))
            if random.Random(f"{seed} {index}").random() < (index % len(shares)) / len(shares):
                mixture.note_filtered(index)
            else:
                kept.add(index)
        return mixture.state, kept

    assert filled(depth) == filled(1)


@given(SHARES, st.data())
def test_closed_source_leaves_its_share_to_the_others(shares: list[float], data: st.DataObject) -> None:
    """After a source is closed, the other sources are mixed as if the closed source had no slots."""
    mixture = Mixture(shares)
    drawn(mixture, data.draw(st.integers(0, 20)))
    if len(shares) == 1:
        with pytest.raises(ConfigError, match=r"prompts.0 cannot be played .broken.*no other prompt source is left"):
            mixture.close_source(0, "broken")
        return
    closed = data.draw(st.integers(0, len(shares) - 1))
    mixture.close_source(closed, "broken")
    issued = drawn(mixture, 3 * len(shares))
    assert all(index % len(shares) != closed for index in issued)
    kept = [count for source, count in enumerate(kept_of(mixture)) if source != closed]
    left = [share for source, share in enumerate(shares) if source != closed]
    for count, share in zip(kept, left, strict=True):
        assert abs(count - sum(kept) * share / sum(left)) <= 1 + len(left)


def test_cursor_of_other_prompt_sources_is_refused() -> None:
    with pytest.raises(ValueError, match="the config has 2, but there are counts of issued prompts for 3"):
        Mixture((1, 1), (1, 2, 3), (0, 0, 0))
    with pytest.raises(ValueError, match="the config has 2, but there are counts"):
        Mixture((1, 1), (1, 2), (0,))


def test_configured_shares_are_listed_by_prompt_source() -> None:
    prompts = [{"family": "gcd", "share": 1}, {"family": "lcm", "share": 2}, {"family": "gcd", "share": 1}]
    config = RunConfig.model_validate({"prompts": [{"kind": "reasoning-gym", **p} for p in prompts]})
    assert config.shares == {"gcd": 0.5, "lcm": 0.5}


# --- whole runs ---------------------------------------------------------------------------------------------


class Filtering(RolloutScheduler):
    """A scheduler that filters three of four groups of one source, and few groups of the other sources."""

    def _add_scored(self, group: TrajectoryGroup, issue: int) -> None:
        source = group.key.prompt % len(self.limits.shares)
        if random.Random(f"{group.key.prompt}").random() < (0.75 if source == FILTERED else 0.05):
            self._discard_filtered(group, "made up")
        else:
            super()._add_scored(group, issue)


class Uneven(TimedEngine):
    """An engine whose responses to one source are ten times as long."""

    def __init__(self, config: TimedEngineConfig) -> None:
        super().__init__(config)
        self._both = self._lengths, ResponseLengths(config.model_copy(update={"median_tokens": 10 * MEDIAN}))

    async def generate(self, request: GenerationRequest) -> Generation:
        self._lengths = self._both[int(request.id.split(".")[0]) % len(MIXED) == SLOW]
        return await super().generate(request)


def mixed(store: MemoryStore, **changes: object) -> Pipeline:
    """Build a run with three prompt sources: one is slow, and one is often filtered."""
    config = TimedEngineConfig(max_concurrent_requests=16, sigma=0.5, max_new_tokens=64, median_tokens=MEDIAN)
    engines = [Uneven(config) for _ in range(2)]
    settings = {"groups": 8, "slots": 16, "shares": MIXED, "scheduler_type": Filtering, "engine_list": engines}
    return Pipeline(store, **(settings | changes))  # type: ignore[arg-type]


def trained(store: MemoryStore) -> list[tuple[TrainedGroup, ...]]:
    """List the trained groups of each policy version."""
    log = Log(store)
    entries = [PolicyStore(log).find(version).batch_entry for version in range(1, log.state.version + 1)]
    return [TrajectoryStore(log).read_commit(entry).groups for entry in entries if entry is not None]


def finished(pipeline: Pipeline) -> AuditReport:
    run_virtual(pipeline.run())
    report = audit(pipeline.store)
    assert report.violations == []
    return report


@pytest.mark.long
@pytest.mark.parametrize("alpha", [0.0, 1.0, 4.0])
def test_trained_prompts_have_the_configured_shares(alpha: float) -> None:
    """The shares hold over the whole run (up to the groups that are in flight at its end), and over any 25 batches to
    within 10 percentage points.
    """
    store = MemoryStore(uuid.uuid4().hex)
    report = finished(mixed(store, versions=150, async_ratio=alpha, train_seconds=0.2))
    assert report.fates["discarded: filtered"] > 400
    batches = trained(store)
    counts = Counter(sources([group.prompt for batch in batches for group in batch], len(MIXED)))
    assert report.domains == {f"source {source}": count for source, count in counts.items()}
    for source, share in enumerate(MIXED):
        assert counts[source] / 1200 == pytest.approx(share, abs=0.02)
        for start in range(0, 150, 25):
            stretch = sources([group.prompt for batch in batches[start : start + 25] for group in batch], 3)
            assert stretch.count(source) / 200 == pytest.approx(share, abs=0.1)


def test_slow_prompt_source_does_not_delay_other_sources() -> None:
    """Batches are formed from the other sources' groups while the groups of the slow source are still in flight."""
    store = MemoryStore(uuid.uuid4().hex)
    run_virtual(mixed(store, versions=10, async_ratio=4.0, train_seconds=0.05).run())
    first = Counter(sources([group.prompt for group in trained(store)[0]], len(MIXED)))
    assert first[SLOW] < MIXED[SLOW] * 8


def test_training_at_alpha_zero_ignores_timing_and_deaths() -> None:
    quiet, other, killed = (MemoryStore(uuid.uuid4().hex) for _ in range(3))
    finished(mixed(quiet, versions=20, async_ratio=0.0))
    narrow = [Uneven(TimedEngineConfig(max_concurrent_requests=3, sigma=0.5, max_new_tokens=64, median_tokens=MEDIAN))]
    finished(mixed(other, versions=20, async_ratio=0.0, engine_list=narrow, slots=3, max_inflight_groups=3))
    draw = random.Random(0)
    for _ in range(12):
        run_virtual(stopped(mixed(killed, versions=20, async_ratio=0.0), draw.uniform(0.1, 1.5)))
    finished(mixed(killed, versions=20, async_ratio=0.0))
    assert trained(quiet) == trained(other) == trained(killed)
    states = [Log(store).state for store in (quiet, other, killed)]
    assert states[0].cursor == states[1].cursor == states[2].cursor


@pytest.mark.many
@settings(max_examples=examples(300), deadline=None)
@given(
    alpha=st.sampled_from([0.0, 0.5, 2.0]),
    groups=st.integers(1, 5),
    depth=st.integers(1, 20),
    seed=st.integers(0, 1000),
    stops=st.lists(st.floats(0.05, 4.0), max_size=4),
    damage=st.dictionaries(
        st.tuples(st.integers(0, 5), st.integers(0, 1)),
        st.sampled_from(["flipped", "cut", "gone"]),
        max_size=4,
    ),
)
def test_prompt_mixture_survives_process_deaths_and_corruption(
    alpha: float, groups: int, depth: int, seed: int, stops: list[float], damage: dict[tuple[int, int], Damage]
) -> None:
    """At the end of the run, every source has its share, to within one group and the groups that are still in
    flight.
    """
    store = MemoryStore(uuid.uuid4().hex)
    changes = {
        "versions": 6,
        "async_ratio": alpha,
        "groups": groups,
        "max_inflight_groups": depth,
        "seed": seed,
        "damage": damage,
    }
    for after in stops:
        run_virtual(stopped(mixed(store, **changes), after))
    report = finished(mixed(store, **changes))
    assert report.fates["trained"] == 6 * groups
    state = Log(store).state
    flying = Counter(sources([key.prompt for key in state.in_flight], len(MIXED)))
    counts = Counter(sources([group.prompt for batch in trained(store) for group in batch], len(MIXED)))
    kept = [issued - gone for issued, gone in zip(state.issued, state.filtered, strict=True)]
    assert kept == [counts[source] + flying[source] for source in range(len(MIXED))]
    if alpha == 0.0 and not damage:
        assert all(abs(kept[s] - 6 * groups * share) < 1 for s, share in enumerate(MIXED))
