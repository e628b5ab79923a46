"""Measures what the optional columns of a batch file cost: bytes, and the time to write and to read the file.

    python -m benchmarks.batch_columns [--quick] [--json FILE]

A batch has 8 responses of 175 tokens in a group. Writing packs groups, joins them and encodes the file; reading opens
and checks the file and touches every token. Cases are measured in turns. In each turn, a case's time is divided by the
time without optional values; the ratio is the median over the turns.

- nothing: no optional value. The file has the same bytes as in releases before these columns existed.
- scores: an outcome and three reward parts in every row.
- turns: the scores, two turns, and a branch in every eighth row.
- experts: 8 layers with 2 experts a token in every row.
- sets: 20 kept tokens for each sampled token.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from benchmarks.data_plane import Work, groups, seconds, touch
from benchmarks.report import Row, arguments, publish
from rollflow.storage.batch import TrajectoryBatch, pack_group
from rollflow.storage.records import Branch, Outcome, Trajectory, TrajectoryGroup
from rollflow.storage.token_arrays import Bools, Float32s, Int16s, Int32s, TokenSets

EXPERTS, KEPT = 16, 20
CASES: dict[str, Callable[[Trajectory], Trajectory]] = {
    "nothing": lambda one: one,
    "scores": lambda one: with_scores(one),
    "turns": lambda one: with_turns(with_scores(one)),
    "experts": lambda one: replace(one, routed_experts=Int16s.same(7, EXPERTS * len(one.tokens))),
    "sets": lambda one: replace(one, kept_tokens=kept_by(one)),
}


def with_scores(one: Trajectory) -> Trajectory:
    """Add an outcome and three reward parts."""
    parts = {"answer": one.reward, "format": 1.0, "length": -0.5}
    return replace(one, outcome=Outcome.CORRECT if one.reward > 0.5 else Outcome.WRONG, reward_parts=parts)


def with_turns(one: Trajectory) -> Trajectory:
    """Add two turns; the last response of a group becomes a branch of the first."""
    first = list(one.loss_mask).index(True)
    return replace(one, turn_starts=(first, first + 50), branch=Branch(0, first) if one.sample == 7 else None)


def kept_by(one: Trajectory) -> TokenSets:
    """Build the sets of kept tokens: one set for each sampled token, which contains the token."""
    tokens = [[token, *range(KEPT - 1)] if own else [] for token, own in zip(one.tokens, one.loss_mask, strict=True)]
    return TokenSets.of(tokens)


def flat(one: Trajectory) -> Trajectory:
    """Convert a trajectory's numbers to arrays, as a run has them."""
    mask, logprobs = Bools.of(one.loss_mask), Float32s.of(one.logprobs)
    return replace(
        one, tokens=Int32s.of(one.tokens), loss_mask=mask, logprobs=logprobs, versions=Int32s.of(one.versions)
    )


def write(made: Sequence[TrajectoryGroup]) -> int:
    """Pack, join and encode a batch; return its size in bytes."""
    return len(memoryview(TrajectoryBatch.from_groups([pack_group(group) for group in made]).to_bytes()))


def read(data: pa.Buffer) -> None:
    """Open and check a file, and touch every token."""
    touch(TrajectoryBatch.from_bytes(data))


def rows(size: int, turns: int) -> list[Row]:
    """Measure a batch of `size` trajectories."""
    made = {
        name: [
            replace(group, trajectories=tuple(change(flat(one)) for one in group.trajectories))
            for group in groups(size)
        ]
        for name, change in CASES.items()
    }
    files = {name: TrajectoryBatch.from_groups(batch).to_bytes() for name, batch in made.items()}
    work: dict[str, dict[str, Work]] = {
        "write": {name: partial(write, batch) for name, batch in made.items()},
        "read": {name: partial(read, data) for name, data in files.items()},
    }
    found = [Row(f"{size} trajectories, {name}", "bytes / a row", files[name].size / size) for name in CASES]
    for verb, sides in work.items():
        times = [{name: seconds(side) for name, side in sides.items()} for _ in range(turns + 1)][1:]
        for name in CASES:
            case = f"{size} trajectories, {name}"
            found.append(Row(case, f"{verb}, ms", statistics.median(turn[name] for turn in times) * 1e3))
            ratio = statistics.median(turn[name] / turn["nothing"] for turn in times)
            found.append(Row(case, f"{verb}, time / that of nothing", ratio))
    return found


def main() -> None:
    """Measure and print the table."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="a small batch and one turn, only to test the benchmark")
    chosen = parser.parse_args()
    sizes, turns = ((16,), 1) if chosen.quick else ((128, 2048), 21)
    publish([row for size in sizes for row in rows(size, turns)], "optional columns of a batch", chosen.json)


if __name__ == "__main__":
    main()
