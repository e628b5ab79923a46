"""Tests of the audit's checks of optional columns: each planted fault is reported, and correct values are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from rollflow.flows.views.audit_table import scorer_lines
from rollflow.storage.audit.audit import audit
from rollflow.storage.audit.optional_rows import CHECKS, check_optional
from rollflow.storage.audit.report import ScorerSpan
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.model_input import ForeignPart, PlacedPart
from rollflow.storage.objects.memory import MemoryStore
from rollflow.storage.optional_columns import COLUMNS, NAMES
from rollflow.storage.records import Branch, GroupKey, Outcome, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Float32s, Int16s, Int64s, TokenSets
from tests.support.audited import found, of_first
from tests.support.log_runs import changed, committed, group, rebatched, told

NONE = float("nan")  # the token has no reward of its own
# A trajectory of these runs has the tokens (1, 2, 3) or (1, 2, 3, 4); the first token is the prompt.
CORRECT: dict[str, Any] = {
    "reward_parts": {"answer": 1.0, "format": 0.5},
    "outcome": Outcome.PARTIAL,
    "turn_starts": (1,),
    "routed_experts": Int16s.of([7, 300, 7, 300, -1, -1]),
    "kept_tokens": TokenSets.of([[], [9, 2], []]),
    "foreign_parts": (),
    "scorer_version": "0123456789ab",
    "token_rewards": Float32s.of([NONE, 0.5, NONE]),
    "turn_states": Int64s.of([-5]),
    "role": "buyer",
}
FAULTS: list[tuple[dict[str, Any], str, str]] = [
    ({"reward_parts": {"answer": float("nan")}}, "lineage", "a reward part of trajectory 8.0.0 is not finite"),
    ({"reward_parts": {"answer": float("inf")}}, "lineage", "a reward part of trajectory 8.0.0 is not finite"),
    ({"scorer_version": "newest"}, "lineage", "trajectory 8.0.0 has the scorer version 'newest'; expected 12"),
    ({"token_rewards": Float32s.of([NONE, 0.5])}, "altered", "trajectory 8.0.0 has 3 tokens and 2 token rewards"),
    ({"token_rewards": Float32s.of([NONE, 0.5, float("inf")])}, "lineage", "the reward of a token is infinite"),
    (
        {"token_rewards": Float32s.of([0.5, NONE, NONE])},
        "lineage",
        "a token that the policy did not sample has a token",
    ),
    ({"outcome": "fine"}, "lineage", "trajectory 8.0.0 has the outcome 'fine'; expected one of ['correct', "),
    ({"turn_starts": (2, 1)}, "lineage", "the turns of trajectory 8.0.0 do not ascend: [2, 1]"),
    ({"turn_starts": (1, 1)}, "lineage", "the turns of trajectory 8.0.0 do not ascend: [1, 1]"),
    ({"turn_starts": (1, 3)}, "altered", "a turn of trajectory 8.0.0 lies outside of its 3 tokens: [1, 3]"),
    ({"turn_starts": (-1, 1)}, "altered", "a turn of trajectory 8.0.0 lies outside of its 3 tokens: [-1, 1]"),
    ({"turn_starts": (0, 1)}, "lineage", "the turns of trajectory 8.0.0 are [0, 1], the policy's tokens begin at [1]"),
    ({"turn_starts": (2,)}, "lineage", "the turns of trajectory 8.0.0 are [2], the policy's tokens begin at [1]"),
    ({"turn_starts": ()}, "lineage", "the turns of trajectory 8.0.0 are [], the policy's tokens begin at [1]"),
    ({"turn_states": Int64s.of([5])}, "altered", "trajectory 8.0.0 has 0 turns and 1 states of turns"),
    (
        {"turn_starts": (1, 2), "turn_states": Int64s.of([5])},
        "altered",
        "trajectory 8.0.0 has 2 turns and 1 states of turns",
    ),
    ({"left_out": False}, "altered", "trajectory 8.0.0 is marked as not left out; only left-out ones are marked"),
    ({"role": ""}, "lineage", "trajectory 8.0.0 has a role without a name"),
    ({"routed_experts": Int16s.of([1, 2])}, "altered", "trajectory 8.0.0 has 3 tokens and 2 routed experts"),
    ({"routed_experts": Int16s.of([1, 2, -2])}, "lineage", "a routed expert is below -1"),
    ({"kept_tokens": TokenSets.of([[], [2]])}, "altered", "trajectory 8.0.0 has 3 tokens and 2 sets of kept tokens"),
    ({"kept_tokens": TokenSets.of([[1], [2], [3]])}, "lineage", "a token that the policy did not sample has a set"),
    ({"kept_tokens": TokenSets.of([[], [9, 3], [3]])}, "lineage", "a sampled token is not in its set of kept tokens"),
    (
        {"kept_tokens": TokenSets.of([[], [2, -5], []])},
        "lineage",
        "a kept token lies outside of the policy's vocabulary",
    ),
]


def image(position: int, length: int = 1) -> PlacedPart:
    return PlacedPart(position, ForeignPart("image", "5e" * 32, length))


FAULTS += [
    (
        {"foreign_parts": (image(2, 2),)},
        "altered",
        "the image of 2 positions at position 2 of trajectory 8.0.0",
    ),
    (
        {"foreign_parts": (image(-1),)},
        "altered",
        "the image of 1 positions at position -1 of trajectory 8.0.0",
    ),
    (
        {"foreign_parts": (image(0, 0),)},
        "altered",
        "the image of 0 positions at position 0 of trajectory 8.0.0",
    ),
    ({"foreign_parts": (image(0), image(0)), "tokens": (-1, 2, 3)}, "altered", "overlaps another part or the end, 3"),
    (
        {"foreign_parts": (image(0),)},
        "lineage",
        "at position 0 of trajectory 8.0.0 has tokens of its own",
    ),
    (
        {"foreign_parts": (image(1),), "tokens": (1, -1, 3)},
        "lineage",
        "at position 1 of trajectory 8.0.0 has tokens",
    ),
    ({"foreign_parts": (), "tokens": (-1, 2, 3)}, "lineage", "a row has a token outside of the policy's vocabulary"),
]


def test_run_with_image_prompts_passes_the_audit(run: MemoryStore) -> None:
    change = {"foreign_parts": (image(0),), "tokens": (-1, 2, 3)}
    rebatched(run, 3, lambda groups: [of_first(groups[0], **change), groups[1]])
    assert found(run) == set()


@pytest.mark.parametrize("name", CORRECT)
def test_audit_accepts_correct_optional_values(run: MemoryStore, name: str) -> None:
    needed = {"turn_starts": (1,)} if name == "turn_states" else {}
    rebatched(run, 3, lambda groups: [groups[0], of_first(groups[1], **{**needed, name: CORRECT[name]})])
    assert found(run) == set()


@pytest.mark.parametrize(("change", "kind", "what"), FAULTS)
def test_audit_finds_each_planted_fault_in_optional_columns(
    run: MemoryStore, change: dict[str, Any], kind: str, what: str
) -> None:
    path = rebatched(run, 3, lambda groups: [of_first(groups[0], **change), groups[1]])
    assert found(run) == {(kind, path)}
    assert what in audit(run).violations[0].what


def test_every_optional_column_is_checked() -> None:
    planted = {name for change, *_ in FAULTS for name in change}
    assert {*CHECKS} == {*NAMES} == (planted & {*NAMES}) | {"branch"}


def test_audit_finds_a_repeated_reward_part() -> None:
    table, field = TrajectoryBatch.from_groups([group(GroupKey(4, 0), 0, 0)]).table, COLUMNS[0]
    parts = pa.array([[("x", 1.0), ("x", 2.0)]] + [None] * 3, field.type)
    [problem] = check_optional(TrajectoryBatch(table.append_column(field, parts)), 10)
    assert problem == ("altered", "trajectory 4.0.0 has the reward part 'x' more than once")


def test_audit_finds_different_numbers_of_experts(run: MemoryStore) -> None:
    def planted(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        first, second = (of_first(group, routed_experts=Int16s.of([0] * 3 * n)) for n, group in enumerate(groups, 1))
        return [first, second]

    path = rebatched(run, 3, planted)
    assert found(run) == {("altered", path)}
    assert "different numbers of routed experts per token: [1, 2]" in audit(run).violations[0].what


# --- branches ----------------------------------------------------------------------------------------------------


def branched(run: MemoryStore, branch: Branch, sample: int = 9, **change: Any) -> str:
    """Add a branch (a trajectory that branches off another one) to the second group of batch 3, and correct the counts
    in the log entry.
    """

    def grown(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
        made = groups[1].trajectories
        more: Trajectory = replace(made[1], sample=sample, branch=branch, **change)
        groups[1] = replace(groups[1], trajectories=(*made, more))
        return groups

    path, groups = "", list[TrajectoryGroup]()
    path = rebatched(run, 3, lambda before: groups.extend(grown(before)) or groups)
    changed(run, committed(run, 3).n, lambda body: replace(body, groups=tuple(map(told, groups))))
    return path


@pytest.mark.parametrize("position", [0, 1, 4])
def test_branch_of_a_response_is_not_counted_as_a_response(run: MemoryStore, position: int) -> None:
    """A group with a branch has one more row than samples. The counts of this group and of the group before it must
    stay right.
    """
    branched(run, Branch(1, position))
    assert found(run) == set()


@pytest.mark.parametrize(
    ("branch", "change", "what"),
    [
        (Branch(7, 1), {}, "trajectory 5.0.9 branches off sample 7, which is not before it in its group"),
        (Branch(9, 1), {}, "trajectory 5.0.9 branches off sample 9, which is not before it in its group"),
        (Branch(1, 5), {}, "trajectory 5.0.9 branches off sample 1 at token 5 of 4"),
        (Branch(0, 4), {}, "trajectory 5.0.9 branches off sample 0 at token 4 of 3"),
        (Branch(1, -1), {}, "trajectory 5.0.9 branches off sample 1 at token -1 of 4"),
        (Branch(1, 3), {"tokens": (1, 2, 9, 4)}, "trajectory 5.0.9 and sample 1 differ before token 3, its branch"),
    ],
)
def test_audit_finds_a_wrong_branch_of_a_response(
    run: MemoryStore, branch: Branch, change: dict[str, Any], what: str
) -> None:
    path = branched(run, branch, **change)
    assert found(run) == {("lineage", path)}
    assert [violation.what for violation in audit(run).violations] == [what]


def test_branch_with_an_existing_sample_number_is_a_duplicate(run: MemoryStore) -> None:
    path = branched(run, Branch(1, 1), sample=1)
    assert found(run) == {("duplicate", path)}


def test_audit_counts_rows_by_scorer_version(run: MemoryStore) -> None:
    """The counts cover the whole run, even if an audit continues from an earlier one. Rows of older releases have no
    scorer version.
    """
    for number, version in ((1, "0" * 12), (2, "f" * 12), (3, "f" * 12)):
        change = {"scorer_version": version}
        rebatched(
            run,
            number,
            lambda groups, change=change: [
                replace(of_first(one, **change), domain="sums") if n == 0 else one for n, one in enumerate(groups)
            ],
        )
    expected = {"sums": {"0" * 12: ScorerSpan(1, 2, 2), "f" * 12: ScorerSpan(2, 3, 4)}}
    assert audit(run).scorers == expected
    assert audit(run).scorers == expected
    assert scorer_lines(audit(run)) == [
        "scorer of sums: 000000000000 (versions 2 to 2, 1 trajectories), ffffffffffff (versions 3 to 4, 2 trajectories)"
    ]
