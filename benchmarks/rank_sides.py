"""Runs one of the learners of `benchmarks.ranks`: starts the learner's other ranks, and takes a train step on request.

All sides minimise GRPO's clipped surrogate as in `learner_sides`, in float32. Each side takes one optimizer step over
the batch, with a fused AdamW and one thread per rank. Every side but `rollflow` computes each response with its own
copy of the prompt.

- `rollflow` is `build_learner(...).step(batch, version)`, starting with the stored Arrow batch: the timed step includes
  sending it to the ranks, reading it and distributing its rows.
- `rollflow-rows` is `rollflow` with `share_prefixes = "none"`, so that it does the same work as the other sides.
- `rollflow-sharded` is `rollflow-rows` with `sharded = true`.
- `ddp` is torch's DistributedDataParallel as users write it. Each rank has every n-th row, as from torch's
  DistributedSampler. Each rank sorts its rows by length, and runs them in padded micro-batches of as many tokens as
  rollflow's micro-batches. Gradients are summed once, during the backward pass of the last micro-batch (`no_sync`
  before). The head is run on the responses' tokens only, and there is no attention mask, as padding on the right needs
  none. Rows are converted to tensors before the clock starts.
- `ddp-dealt` is `ddp`, with the rows distributed by their tokens as rollflow distributes them.
- `ddp-same` is `ddp-dealt` with rollflow's own log-softmax: only the ranks differ.
- `fsdp` has ddp-dealt's rows and module under torch's `fully_shard`, layer by layer, as users write it. Every rank runs
  as many passes as the rank with the most passes.
- `deepspeed` has ddp-same's rows and module in DeepSpeed's engine, ZeRO 2, which adds up gradients in every pass.
- `rollflow-deepspeed` is `rollflow-rows` with `train.kind = "deepspeed"`, ZeRO 2.

With one rank all torch sides are plain torch.

Run it as `python -m benchmarks.rank_sides SIDE TOKENS FOLDER RANKS`; `learner_sides.Turns` describes its input and
output. When its input ends, the first rank writes its weights into the folder.
"""

from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learner_batches import BATCH
from benchmarks.learner_sides import BETAS, HIGH, LONGEST_GRADIENT, LOW, Row, Turns, groups_of, rows_of
from rollflow.storage.batch import TrajectoryBatch
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.checkpoint.shards import from_files
from rollflow.tasks.learners.config import DeepSpeedTrain, TorchTrain
from rollflow.tasks.learners.distributed.load_balance import deal_pieces
from rollflow.tasks.learners.forward.inplace_logprobs import chosen_tokens
from rollflow.tasks.learners.forward.reference import named_tensors
from rollflow.tasks.learners.torch_learner import load_model

RATE = 1e-4  # so high that wrong updates change the weights far more than rounding does
MEAN = "exp_avg/"
Micros = Sequence[Sequence[Row]]


class Clock:
    """A clock that measures a step: wall-clock seconds, and CPU seconds of this process and its children."""

    def __init__(self) -> None:
        self._below = psutil.Process().children(recursive=True)

    def begin(self) -> None:
        """Start the clock of a step."""
        self._began = self._now()

    def read(self) -> tuple[float, float]:
        """Return the seconds since the start of the step."""
        clock, processors = self._now()
        return clock - self._began[0], processors - self._began[1]

    def _now(self) -> tuple[float, float]:
        below = sum(sum(process.cpu_times()[:2]) for process in self._below)
        return time.perf_counter(), time.process_time() + below


def rollflow(folder: Path, ranks: int, tokens: int, turns: Turns, name: str = "rollflow") -> None:
    """Run rollflow's learner through its public functions."""
    chosen = {
        "learning_rate": RATE,
        "warmup_versions": 0,
        "betas": BETAS,
        "max_grad_norm": LONGEST_GRADIENT,
        "micro_tokens": tokens,
        "share_prefixes": "all" if name == "rollflow" else "none",
        "ranks": ranks,
    }
    config = (
        DeepSpeedTrain(**chosen)
        if name == "rollflow-deepspeed"
        else TorchTrain(**chosen, sharded=name == "rollflow-sharded")
    )
    learner = build_learner(config, LearnerStart(folder, trained=True))
    batch = TrajectoryBatch.from_bytes((folder / BATCH).read_bytes())
    turns.ready()
    version, clock = 0, Clock()
    while turns.wait():
        clock.begin()
        found = learner.step(batch, version)
        turns.tell(clock.read(), found["loss"], found["grad_norm"])
        version += 1
    _write(folder, f"{name}-{ranks}", from_files(learner.weights()), from_files(learner.state()))


class GroupLoss(nn.Module):
    """The sum of the loss over the response tokens of some rows; `same` selects rollflow's own log-softmax."""

    def __init__(self, model: Any, *, same: bool = False) -> None:
        super().__init__()
        self.model, self.same = model, same

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Pad the rows and return their loss, a scalar."""
        parts = [row[:3] for row in rows]
        tokens_RT, mask_RT, old_RT = (pad_sequence([part[n] for part in parts], batch_first=True) for n in range(3))
        row_M, place_M = mask_RT[:, 1:].nonzero(as_tuple=True)
        hidden_MH = self.model.model(input_ids=tokens_RT, use_cache=False).last_hidden_state[row_M, place_M]
        targets_M = tokens_RT[row_M, place_M + 1]
        logits_MV = self.model.lm_head(hidden_MH)
        if self.same:
            logp_M, _ = chosen_tokens(logits_MV, targets_M, temperature=1.0, entropy=False)
        else:
            logp_M = -nn.functional.cross_entropy(logits_MV, targets_M, reduction="none")
        ratio_M = (logp_M - old_RT[row_M, place_M + 1]).exp()
        advantage_M = torch.tensor([row[3] for row in rows])[row_M]
        return -torch.minimum(ratio_M * advantage_M, ratio_M.clamp(1 - LOW, 1 + HIGH) * advantage_M).sum()


def ddp(folder: Path, ranks: int, tokens: int, turns: Turns | None, name: str = "ddp") -> None:
    """Run torch's DistributedDataParallel, or plain torch on one rank. `turns` belong to the first rank."""
    inner = GroupLoss(load_model(folder, "float32", trained=True).eval(), same=name == "ddp-same")
    optimizer = torch.optim.AdamW(inner.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    module: Any = DistributedDataParallel(inner, gradient_as_bucket_view=True) if ranks > 1 else inner
    rows = rows_of(groups_of(folder))
    weight = ranks / sum(int(row[1].sum()) for row in rows)  # cancels the mean over ranks
    micros = micro_batches(own_rows(rows, ranks, dealt=name != "ddp"), tokens)
    for clock in steps(ranks, turns):
        total = torch.zeros(())
        for number, micro in enumerate(micros):
            last = ranks == 1 or number == len(micros) - 1
            with nullcontext() if last else module.no_sync():
                loss = module(micro) * weight
                loss.backward()
            total += loss.detach() / ranks
        norm = nn.utils.clip_grad_norm_(inner.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        _tell(ranks, turns, clock, total, float(norm))
    if turns:
        _write(folder, f"{name}-{ranks}", named_tensors(inner.model), means_of(inner.model, optimizer))


def fsdp(folder: Path, ranks: int, tokens: int, turns: Turns | None) -> None:
    """Run torch's fully_shard, which sums gradients in each backward pass."""
    inner: Any = GroupLoss(load_model(folder, "float32", trained=True).eval())
    for module in [*inner.model.model.layers, inner]:
        fully_shard(module).set_force_sum_reduction_for_comms(True)  # the gloo backend has no mean
    optimizer = torch.optim.AdamW(inner.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    rows = rows_of(groups_of(folder))
    weight = ranks / sum(int(row[1].sum()) for row in rows)  # cancels the mean over ranks
    parts = as_many(micro_batches(own_rows(rows, ranks, dealt=True), tokens), weight, ranks)
    for clock in steps(ranks, turns):
        total = torch.zeros(())
        for micro, share in parts:
            loss = inner(micro) * share
            loss.backward()
            total += loss.detach() / ranks
        norm: Any = nn.utils.clip_grad_norm_(inner.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad()
        _tell(ranks, turns, clock, total, float(norm.full_tensor()))
    found: list[dict[str, Any]] = [named_tensors(inner.model), means_of(inner.model, optimizer)]
    weights, means = ({name: tensor.full_tensor() for name, tensor in part.items()} for part in found)
    if turns:
        _write(folder, f"fsdp-{ranks}", weights, means)


def deepspeed(folder: Path, ranks: int, tokens: int, turns: Turns | None) -> None:
    """Run DeepSpeed's ZeRO 2, which sums gradients in each backward pass, so all ranks run equally many passes."""
    library = importlib.import_module("deepspeed")
    library.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling this operator would take most of a minute
    library.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    inner = GroupLoss(load_model(folder, "float32", trained=True).eval(), same=True)
    rows = rows_of(groups_of(folder))
    weight = ranks / sum(int(row[1].sum()) for row in rows)
    parts = as_many(micro_batches(own_rows(rows, ranks, dealt=True), tokens), weight, ranks)
    engine, *_ = library.initialize(
        model=inner,
        optimizer=torch.optim.AdamW(inner.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(parts),
            "gradient_clipping": LONGEST_GRADIENT,
            "zero_optimization": {"stage": 2},
            "zero_allow_untested_optimizer": True,
        },
    )
    for clock in steps(ranks, turns):
        total = torch.zeros(())
        for micro, share in parts:
            loss = engine(micro) * share
            engine.backward(loss * len(parts))  # cancels that DeepSpeed averages over the parts
            engine.step()
            total += loss.detach() / ranks
        _tell(ranks, turns, clock, total, float(engine.get_global_grad_norm()))
    if turns:
        _write(folder, f"deepspeed-{ranks}", named_tensors(inner.model), {})


def as_many(micros: Micros, weight: float, ranks: int) -> list[tuple[Sequence[Row], float]]:
    """Add micro-batches of weight zero, so that each rank has as many as the rank with the most."""
    count = torch.tensor(len(micros))
    if ranks > 1:
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
    return [(micro, weight) for micro in micros] + [(micros[-1], 0.0)] * (int(count) - len(micros))


def own_rows(rows: Sequence[Row], ranks: int, *, dealt: bool) -> list[Row]:
    """Return the rows of this rank, the longest first."""
    lengths, rank = [len(row[0]) for row in rows], int(os.environ.get("RANK", 0))
    own = deal_pieces(lengths, ranks)[rank] if dealt else range(rank, len(rows), ranks)
    return [rows[number] for number in sorted(own, key=lambda number: -lengths[number])]


def micro_batches(rows: Sequence[Row], tokens: int) -> Micros:
    """Split `rows` (longest first) into micro-batches of at most `tokens` padded tokens, but at least one row."""
    found, begin = [], 0
    while begin < len(rows):
        end = begin + max(1, tokens // len(rows[begin][0]))
        found.append(rows[begin:end])
        begin = end
    return found


def steps(ranks: int, turns: Turns | None) -> Iterator[Clock]:
    """Yield once for each step that the first rank is requested to take."""
    if turns:
        turns.ready()
    go, clock = torch.zeros(1), Clock()
    while True:
        go[0] = float(turns.wait()) if turns else 0.0
        if ranks > 1:
            dist.broadcast(go, 0)
        if not go:
            return
        clock.begin()
        yield clock


def _tell(ranks: int, turns: Turns | None, clock: Clock, loss: Tensor, norm: float) -> None:
    times = clock.read()
    if ranks > 1:
        dist.all_reduce(loss)  # the loss is only reported, so this sum is not timed
    if turns:
        turns.tell(times, float(loss), norm)


def means_of(model: Any, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return AdamW's first moment of each parameter, under the names that rollflow's learner state uses."""
    return {f"{MEAN}{name}": optimizer.state[given]["exp_avg"] for name, given in model.named_parameters()}


def _write(folder: Path, name: str, weights: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Write the weights and the first moments."""
    means = {key: tensor for key, tensor in state.items() if key.startswith(MEAN)}
    save_file({**weights, **means}, folder / f"{name}.weights")


SIDES: dict[str, Callable[[Path, int, int, Any], None]] = {
    "rollflow": rollflow,
    "rollflow-rows": partial(rollflow, name="rollflow-rows"),
    "rollflow-sharded": partial(rollflow, name="rollflow-sharded"),
    "rollflow-deepspeed": partial(rollflow, name="rollflow-deepspeed"),
    "ddp": ddp,
    "ddp-dealt": partial(ddp, name="ddp-dealt"),
    "ddp-same": partial(ddp, name="ddp-same"),
    "fsdp": fsdp,
    "deepspeed": deepspeed,
}


def main() -> None:
    side, tokens, folder, ranks = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    if side.startswith("rollflow"):
        SIDES[side](folder, ranks, tokens, Turns())
        return
    first = "RANK" not in os.environ
    with ExitStack() as stack:
        if first:
            _start_others(ranks, stack)
        if ranks > 1 or side == "deepspeed":
            dist.init_process_group("gloo")
            stack.callback(dist.destroy_process_group)
        SIDES[side](folder, ranks, tokens, Turns() if first else None)


def _start_others(ranks: int, stack: ExitStack) -> None:
    """Start the other ranks; this process becomes the first rank, and the others end with their group."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
    for rank in range(1, ranks):
        command = [sys.executable, "-m", "benchmarks.rank_sides", *sys.argv[1:]]
        stack.enter_context(subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}, stdin=subprocess.DEVNULL))
    os.environ |= {"RANK": "0"}


if __name__ == "__main__":
    main()
