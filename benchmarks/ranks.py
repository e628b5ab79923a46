"""Compares a learner of several ranks with torch's DistributedDataParallel: tokens per second on 1 and 2 ranks.

All sides have the same policy, ragged batch and loss (see `rank_sides`), and one thread per rank. The sides step in
turns, in alternating order, and a ratio compares two steps of one turn. Losses and gradient norms must agree in every
step, and gradients after the last one. Differences of weights are only reported, because AdamW amplifies the rounding
of gradients near zero. The CPU time of all ranks together is reported, too, because other work on the machine changes
it less.

The target applies to `rollflow-rows`, which has the rows of `ddp-dealt` on the same ranks and in the same
micro-batches. It differs from `ddp-same` only in how the ranks communicate. `rollflow` also shares prompts.
`rollflow-sharded` and `fsdp` have the same rows, and a shard of the weights on each rank. Tokens are those of the
responses. DeepSpeed is measured if it is installed. Run it as `python -m benchmarks.ranks`.
"""

from __future__ import annotations

import importlib.util
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from benchmarks.learner_batches import BATCH
from benchmarks.learner_step import Case, Side, Step, told, written
from benchmarks.rank_sides import MEAN
from benchmarks.report import Row, arguments, at_least, at_most, publish
from rollflow.storage.batch import TrajectoryBatch
from rollflow.tasks.learners.distributed.load_balance import deal_pieces, measure_imbalance
from rollflow.tasks.objectives.rows import BatchRows

AS_FAST, NEAR = 0.95, 1e-5
COMPARED = {  # a side of rollflow -> the sides with which it is compared
    "rollflow-rows": ("ddp-dealt", "ddp-same", "ddp", "deepspeed"),
    "rollflow": ("ddp-dealt", "ddp-same", "ddp", "deepspeed"),
    "rollflow-sharded": ("fsdp", "deepspeed"),
    "rollflow-deepspeed": ("deepspeed",),
}
NO_DEEPSPEED = "DeepSpeed is not measured: it is not installed."
Key = tuple[str, int]  # (side, number of ranks)


class RanksSide(Side):
    """The process of one side, where `count` is the number of ranks."""

    module = "benchmarks.rank_sides"


def in_turns(case: Case, keys: Sequence[Key], tokens: int, turns: int) -> dict[Key, list[Step]]:
    """Run the steps of all sides in turns; the first step of each side is a warm-up."""
    found: dict[Key, list[Step]] = {key: [] for key in keys}
    with ExitStack() as stack:
        sides = [stack.enter_context(RanksSide(name, str(tokens), case.folder, ranks)) for name, ranks in keys]
        for turn in range(turns + 1):
            for side in sides if turn % 2 else reversed(sides):
                found[side.name, side.count].append(side.step())
    return found


def rows_of(case: str, case_tokens: int, found: Mapping[Key, list[Step]]) -> Iterator[Row]:
    """Return rows with each side's speed, its speed-up by more ranks, and the ratio of rollflow's speed to other sides'
    with equal ranks.
    """
    for (name, ranks), steps in found.items():
        side = f"{name}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
        yield Row(case, f"{side}: tokens/s", statistics.median(case_tokens / step.seconds for step in steps[1:]))
        per_processor = statistics.median(case_tokens / step.cpu for step in steps[1:])
        yield Row(case, f"{side}: tokens/s of a processor", per_processor)
    for ours, theirs in ((ours, theirs) for ours in found for theirs in found):
        if theirs[0] in COMPARED.get(ours[0], ()) and ours[1] == theirs[1]:
            what = f"{ours[0]} over {theirs[0]}, ranks {ours[1]}"
            yield from _ratios(case, what, found[theirs], found[ours], AS_FAST)
    for name, ranks in found:
        if ranks > 1 and (name, 1) in found:
            what = f"{name}, {ranks} ranks over 1"
            yield from _ratios(case, what, found[name, 1], found[name, ranks])


def _ratios(case: str, what: str, slow: Sequence[Step], fast: Sequence[Step], target: float = 0.0) -> Iterator[Row]:
    """Return the speed ratio of each pair of steps: the second side's speed divided by the first side's."""
    pairs = list(zip(slow[1:], fast[1:], strict=True))
    ratios = [one.seconds / other.seconds for one, other in pairs]
    middle = statistics.median(ratios)
    yield at_least(case, f"{what}: median", middle, target) if target else Row(case, f"{what}: median", middle)
    yield Row(case, f"{what}: least", min(ratios))
    yield Row(case, f"{what}: most", max(ratios))
    yield Row(case, f"{what}: by processor time", statistics.median(one.cpu / other.cpu for one, other in pairs))


def agreement(case: str, folder: Path, found: Mapping[Key, list[Step]]) -> Iterator[Row]:
    """Return the largest differences between any two sides; gradients are compared by AdamW's first moments."""
    if len(found) < 2:
        return
    pairs = [pair for one, other in combinations(found, 2) for pair in zip(found[one], found[other], strict=True)]
    written = [load_file(folder / f"{name}-{ranks}.weights") for name, ranks in found]
    apart = {
        "losses": max(abs(one.loss - other.loss) for one, other in pairs),
        "gradient norms, as a share": max(abs(one.norm / other.norm - 1) for one, other in pairs),
        "gradients": _farthest(written, lambda name: name.startswith(MEAN)),
    }
    for what, most in apart.items():
        yield at_most(case, f"{what}, most apart: 1e-6", 1e6 * most, 1e6 * NEAR)
    weights = _farthest(written, lambda name: not name.startswith(MEAN))
    yield Row(case, "weights, most apart: 1e-6", 1e6 * weights)


def _farthest(written: Sequence[Mapping[str, Tensor]], which: Callable[[str], bool]) -> float:
    """Return the largest difference between any two sides' tensors."""
    names = [name for name in written[0] if which(name)]
    apart = (
        float((one[name] - other[name]).abs().max())
        for one, other in combinations(written, 2)
        for name in names
        if name in one and name in other
    )
    return max(apart, default=math.nan)  # NaN for gradients of DeepSpeed's side, which writes none


def dealing(case: Case, counts: Sequence[int]) -> Iterator[Row]:
    """Return by how many per cent the rank with the most tokens exceeds the mean, for two ways to distribute rows to
    ranks.
    """
    data = BatchRows.of(TrajectoryBatch.from_bytes((case.folder / BATCH).read_bytes()))
    lengths = [int(length) for length in data.lengths]
    for ranks in counts:
        turn = [sum(lengths[rank::ranks]) for rank in range(ranks)]
        dealt = [sum(lengths[row] for row in own) for own in deal_pieces(lengths, ranks)]
        for how, loads in (("every n-th row", turn), ("dealt", dealt)):
            yield Row(case.name, f"{ranks} ranks, {how}: fullest above the mean, %", 100 * measure_imbalance(loads))


def sides_of(counts: Sequence[int], *, deepspeed: bool) -> list[Key]:
    """Return all sides for these numbers of ranks, with compared sides adjacent."""
    found = []
    for ranks in counts:
        several = ["ddp-dealt", "fsdp", "rollflow-sharded"] if ranks > 1 else []
        theirs = ["deepspeed", *(["rollflow-deepspeed"] if ranks > 1 else [])] if deepspeed else []
        names = ["rollflow", "rollflow-rows", "ddp-same", *several, "ddp", *theirs]
        found += [(name, ranks) for name in names]
    return found


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="ragged", help="name of the workload; `tiny` only tests the benchmark")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--sides", nargs="*", help="names of sides to measure (default: all); each rank takes 300 MB")
    parser.add_argument("--tokens", type=int, default=512, help="padded tokens of a micro-batch, for all sides")
    parser.add_argument("--turns", type=int, default=9)
    options = parser.parse_args()
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    with tempfile.TemporaryDirectory() as place:
        case = written(options.only, 0.0, Path(place))
        sides = [key for key in sides_of(options.ranks, deepspeed=deepspeed) if key[0] in (options.sides or [key[0]])]
        found = in_turns(case, sides, options.tokens, options.turns)
        rows = told(iter([*dealing(case, [2, 4]), *rows_of(case.name, case.tokens, found)]))
        rows += told(agreement(case.name, case.folder, found))
    if not deepspeed:
        print(NO_DEEPSPEED, file=sys.stderr)
    publish(rows, "a learner of several ranks: rollflow beside torch", options.json)


if __name__ == "__main__":
    main()
