"""Compares train steps that compute shared prefix tokens only once with steps on packed rows without sharing.

Workloads (`learner_batches`): `prompt` has groups of 8 answers of 64 tokens to a prompt of 512 tokens. `agent` has
episodes of ten turns. Each turn is a row, whose context has the actions and answers of earlier turns, but not their
thoughts, so there is a branch in each turn. The small policy has 4 layers of width 192, and the wide one 4 layers of
width 512, both with a vocabulary of 8,000 tokens. Loss, precision and time measurement are those of `learner_sides`.
Each step uses one thread.

`rollflow-rows` has its best setting of the sweep; memory is compared at the same number of tokens per pass. The bound
of the speed-up is the ratio of the numbers of tokens. It holds for a step without attention, output head and optimizer:
the output head and the optimizer cost both sides the same, while attention saves more than this ratio.

Run it as `python -m benchmarks.prefix_trees`.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.learner_batches import BATCH
from benchmarks.learner_step import Case, Step, in_turns, swept, told, written
from benchmarks.report import Row, arguments, at_least, at_most, publish
from rollflow.storage.batch import TrajectoryBatch
from rollflow.tasks.objectives.packing import micro_batches
from rollflow.tasks.objectives.prefixes.lines import Sharing
from rollflow.tasks.objectives.rows import BatchRows

TOKENS = "8192"  # tokens per pass of the sides that share tokens
NEAR = 1e-6
FASTER = {"prompt": 3.0, "prompt-wide": 3.0, "agent": 7.0, "agent-wide": 7.0, "agent-tiny": 1.0}
ROWS: Mapping[str, Sequence[str]] = {  # settings of the side without sharing, by workload
    "prompt": ("1024", "4096", TOKENS),
    "prompt-wide": ("4096", TOKENS),
    "agent": ("2048", TOKENS),
    "agent-wide": (TOKENS,),
    "agent-tiny": (TOKENS,),
}


def rows_of(case: Case, best: str, found: Mapping[str, list[Step]]) -> Iterator[Row]:
    """Return the rows of a case: tokens, speed and memory of a step, and the differences between gradient norms."""
    trees = found["rollflow"]
    yield from token_rows(case)
    for name, steps in found.items():
        yield Row(case.name, f"{name}: seconds", statistics.median(step.seconds for step in steps[1:]))
        yield Row(case.name, f"{name}: peak, MB", steps[-1].memory / 1e6)
    for name in ("rollflow-rows", "rollflow-prompts"):
        pairs = list(zip(trees[1:], found[name][1:], strict=True))
        ratios = [theirs.seconds / own.seconds for own, theirs in pairs]
        said = f"speed over {name} ({best if name == 'rollflow-rows' else TOKENS})"
        target = FASTER[case.workload] if name == "rollflow-rows" else 1.0
        yield at_least(case.name, f"{said}: median", statistics.median(ratios), target)
        yield Row(case.name, f"{said}: by processor time", statistics.median(b.cpu / a.cpu for a, b in pairs))
        yield Row(case.name, f"{said}: least", min(ratios))
        yield Row(case.name, f"{said}: most", max(ratios))
    apart = [abs(one.norm / other.norm - 1) for one, other in zip(trees, found["rollflow-rows"], strict=True)]
    yield at_most(case.name, "gradient norms, most apart: 1e-6", 1e6 * max(apart), 1e6 * NEAR)


def token_rows(case: Case) -> Iterator[Row]:
    """Return rows about the tokens of one forward pass over the batch."""
    data = BatchRows.of(TrajectoryBatch.from_bytes((case.folder / BATCH).read_bytes()))
    rows, size = range(len(data.rewards)), count_tree(data)
    width = json.loads((case.folder / "config.json").read_text())["hidden_size"]
    passes = micro_batches(data, rows, int(TOKENS), Sharing(width, by_path=True))
    forwarded = sum(micro.tokens.numel() for micro in passes)
    yield Row(case.name, "tokens of all rows", float(data.offsets[-1]))
    yield Row(case.name, "tokens of the trees", size)
    yield at_most(case.name, "tokens forwarded / tokens of the trees", forwarded / size, 1.02)
    yield Row(case.name, "tokens of all rows / tokens forwarded (bound)", float(data.offsets[-1]) / forwarded)


def count_tree(data: BatchRows) -> int:
    """Return the number of tokens in all prefix trees: the number of different prefixes of the rows, counted in each
    group.
    """
    paths: dict[tuple[int, int], int] = {}
    for row, group in enumerate(data.groups.tolist()):
        node = -1 - group
        for token in data.tokens[data.offsets[row] : data.offsets[row + 1]].tolist():
            node = paths.setdefault((node, token), len(paths))
    return len(paths)


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", nargs="*", choices=list(ROWS), default=list(ROWS)[:4], help="workloads")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for workload in options.only:
            case = written(workload, 0.0, Path(folder))
            best, shown = swept(case, {"rollflow-rows": ROWS[workload]}, 1, 1)
            sides = {"rollflow": TOKENS, "rollflow-rows": best["rollflow-rows"], "rollflow-prompts": TOKENS}
            found = in_turns(case, sides, 1, options.turns)
            peak = next(row.value for row in shown if row.metric == f"sweep, rollflow-rows {TOKENS}: peak, MB")
            memory = at_most(
                case.name, f"memory over rollflow-rows ({TOKENS})", found["rollflow"][-1].memory / 1e6 / peak, 1.0
            )
            rows += told(iter([*shown, *rows_of(case, sides["rollflow-rows"], found), memory]))
    publish(rows, "train steps with prefix trees", options.json)


if __name__ == "__main__":
    main()
