"""Runs one of the learners of `benchmarks.learner_step` in its own process, which takes a train step on request.

All learners minimise the same loss: GRPO's clipped surrogate with the ratio to the recorded log-probs, clipping at 0.2
and 0.28, and the mean over the tokens of the whole batch. Then the gradient norm is clipped to 1, and AdamW takes a
step. All computations are in float32. One optimizer step over the batch is timed. The process prints its seconds, loss,
gradient norm and peak memory.

- `rollflow` is `build_learner(...).step(batch, version)`: it starts with the stored Arrow batch, and includes
  advantages and packing.
- `rollflow-rows` and `rollflow-prompts` are `rollflow` with `share_prefixes = "none"` and `"prompts"`.
- `trl` is `GRPOTrainer.train()` of TRL, with a rollout that returns the recorded batch. The measured time begins with
  the scored and padded batch (the result of `_generate_and_score_completions`), and ends with the optimizer step
  (`on_step_end`). TRL's `old_per_token_logps` are the recorded log-probs, so TRL needs no pass to compute them. AdamW
  is fused, which is TRL's default.
- `trl-compact` is `trl` with the head on the completions' tokens only, as TRL does on a GPU; on a CPU TRL runs the head
  on every position.
- `plain` is a loop of twenty lines. Rows keep the order of the batch, padded on the right to the longest row of a
  micro-batch. AdamW is fused.

Run it as `python -m benchmarks.learner_sides SIDE SETTING FOLDER THREADS`; `Turns` describes its input and output. A
setting is the number of padded tokens of a micro-batch for rollflow, and the number of rows for the others; with a `c`,
activations are recomputed (rollflow's `checkpoint_activations`, TRL's gradient checkpointing).

Memory counts from the end of loading, when every side has its weights and rows. Gradients, AdamW's two moments,
activations, logits and the tensors of micro-batches come later. After loading, TRL also copies the rows into one padded
batch.

Seconds are wall-clock seconds. CPU seconds are reported, too, because other work on the machine changes them less.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.learner_batches import BATCH
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.records import TrajectoryGroup
from rollflow.tasks.learners import build_learner
from rollflow.tasks.learners.base import LearnerStart
from rollflow.tasks.learners.config import TorchTrain
from rollflow.tasks.learners.torch_learner import load_model

RATE = 1e-6  # a learning rate so low that a step hardly changes the weights
BETAS, LOW, HIGH, LONGEST_GRADIENT = (0.9, 0.95), 0.2, 0.28, 1.0
MANY = 10**6  # the largest number of steps that TRL's trainer may take


class Turns:
    """The protocol of a side: each line on standard input requests a step, and standard output gets its result as JSON.

    The first output line has the memory after loading. All other output goes to standard error.
    """

    def __init__(self) -> None:
        self._told = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self) -> None:
        """Report the end of loading, from which memory counts."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's peak memory of this process
        self._tell({"peak": peak()})

    def wait(self) -> bool:
        """Wait for a request; return whether another step is requested."""
        return bool(sys.stdin.readline())

    def tell(self, times: tuple[float, float], loss: float, norm: float) -> None:
        """Report the result of a step; `times` are wall-clock and CPU seconds."""
        self._tell({"seconds": times[0], "cpu": times[1], "loss": loss, "norm": norm, "peak": peak()})

    def _tell(self, found: dict[str, float]) -> None:
        print(json.dumps(found), file=self._told, flush=True)


def peak() -> int:
    """Return the peak memory of this process in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def now() -> tuple[float, float]:
    """Return the wall-clock time and the CPU time of this process, in seconds."""
    return time.perf_counter(), time.process_time()


def since(began: tuple[float, float]) -> tuple[float, float]:
    """Return the elapsed wall-clock and CPU seconds."""
    clock, processor = now()
    return clock - began[0], processor - began[1]


def rollflow(folder: Path, setting: str, turns: Turns, share: Literal["all", "prompts", "none"] = "all") -> None:
    """Run rollflow's learner through its public functions."""
    config = TorchTrain(
        learning_rate=RATE,
        warmup_versions=0,
        betas=BETAS,
        max_grad_norm=LONGEST_GRADIENT,
        micro_tokens=int(setting.removesuffix("c")),
        checkpoint_activations=setting.endswith("c"),
        share_prefixes=share,
        threads=torch.get_num_threads(),
    )
    learner = build_learner(config, LearnerStart(folder, trained=True))
    batch = TrajectoryBatch.from_bytes((folder / BATCH).read_bytes())
    turns.ready()
    version = 0
    while turns.wait():
        began = now()
        found = learner.step(batch, version)
        turns.tell(since(began), found["loss"], found["grad_norm"])
        version += 1


def plain(folder: Path, setting: str, turns: Turns) -> None:
    """Run the plain loop with transformers and AdamW."""
    model = load_model(folder, "float32", trained=True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    rows = rows_of(groups_of(folder))
    tokens = sum(int(mask.sum()) for _, mask, _, _ in rows)
    turns.ready()
    while turns.wait():
        began, total = now(), 0.0
        for start in range(0, len(rows), int(setting)):
            loss = _plain_loss(model, rows[start : start + int(setting)]) / tokens
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), LONGEST_GRADIENT)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.tell(since(began), total, float(norm))


Row = tuple[Tensor, Tensor, Tensor, float]  # tokens, mask of the response's tokens, their log-probs, the advantage


def rows_of(groups: Sequence[TrajectoryGroup]) -> list[Row]:
    found: list[Row] = []
    for group in groups:
        rewards = torch.tensor([t.reward for t in group.trajectories])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for t, advantage in zip(group.trajectories, advantages.tolist(), strict=True):
            found.append((torch.tensor(t.tokens), torch.tensor(t.loss_mask), torch.tensor(t.logprobs), advantage))
    return found


def _plain_loss(model: Any, rows: Sequence[Row]) -> Tensor:
    """Return the loss, summed over the response tokens."""
    parts = [row[:3] for row in rows]
    tokens_RT, mask_RT, old_RT = (pad_sequence([part[n] for part in parts], batch_first=True) for n in range(3))
    attention_RT = pad_sequence([torch.ones_like(row[0]) for row in rows], batch_first=True)
    advantage_R1 = torch.tensor([row[3] for row in rows])[:, None]
    logits_RTV = model(input_ids=tokens_RT, attention_mask=attention_RT, use_cache=False).logits[:, :-1]
    logp_RT = torch.log_softmax(logits_RTV.float(), -1).gather(-1, tokens_RT[:, 1:, None]).squeeze(-1)
    ratio_RT = (logp_RT - old_RT[:, 1:]).exp()
    held_RT = ratio_RT.clamp(1 - LOW, 1 + HIGH)
    return -(torch.minimum(ratio_RT * advantage_R1, held_RT * advantage_R1) * mask_RT[:, 1:]).sum()


def trl(folder: Path, setting: str, turns: Turns) -> None:
    """Run TRL's trainer."""
    rows, checkpointing = int(setting.removesuffix("c")), setting.endswith("c")
    trl, datasets, transformers = map(importlib.import_module, ("trl", "datasets", "transformers"))
    groups = groups_of(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with tempfile.TemporaryDirectory() as place:
        trainer = trl.GRPOTrainer(
            model=load_model(folder, "float32", trained=True),
            reward_funcs=lambda completions, score, **_: score,
            args=trl.GRPOConfig(place, **_trl_settings(groups, rows), gradient_checkpointing=checkpointing),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["-"] * len(groups)}),
            processing_class=tokenizer,
            rollout_func=lambda prompts, trainer: _rollout(groups),
        )
        _take_turns(trainer, turns, transformers.TrainerCallback)
        turns.ready()
        trainer.train()


def trl_compact(folder: Path, setting: str, turns: Turns) -> None:
    """Run TRL's trainer with the head on the completions only."""
    utils: Any = importlib.import_module("trl.trainer.utils")
    utils._use_triton = lambda device: True  # this only makes TRL compute the head on the completions' positions
    trl(folder, setting, turns)


def _trl_settings(groups: Sequence[TrajectoryGroup], rows: int) -> dict[str, Any]:
    size = len(groups[0].trajectories)
    count = len(groups) * size
    if count % rows:
        raise SystemExit(f"{count} rows are no whole number of micro-batches of {rows}")
    return {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": count // rows,
        "num_generations": size,
        "max_steps": MANY,
        "shuffle_dataset": False,
        "loss_type": "dapo",  # DAPO's loss is the mean over the tokens of the batch
        "epsilon": LOW,
        "epsilon_high": HIGH,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": LONGEST_GRADIENT,
        "use_cpu": True,
        "bf16": False,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def _rollout(groups: Sequence[TrajectoryGroup]) -> dict[str, list[Any]]:
    """Return the recorded batch in TRL's format."""
    found: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "score": []}
    for t in (t for group in groups for t in group.trajectories):
        start = t.loss_mask.index(True)
        found["prompt_ids"].append(list(t.tokens[:start]))
        found["completion_ids"].append(list(t.tokens[start:]))
        found["logprobs"].append(list(t.logprobs[start:]))
        found["score"].append(t.reward)
    return found


def _take_turns(trainer: Any, turns: Turns, callback: Any) -> None:
    """Make the trainer wait before each step, and report each step."""
    score, took, began = trainer._generate_and_score_completions, now(), now()

    def scored(inputs: Any) -> Any:
        nonlocal began
        made = score(inputs)
        made["old_per_token_logps"] = made["sampling_per_token_logps"]
        if not turns.wait():
            os._exit(0)  # exit at once after the last step, because nothing must be saved
        began = now()
        return made

    class Told(callback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            nonlocal took
            took = since(began)

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
            turns.tell(took, logs["loss"], logs["grad_norm"])

    trainer._generate_and_score_completions = scored
    trainer.add_callback(Told())


def groups_of(folder: Path) -> list[TrajectoryGroup]:
    return TrajectoryBatch.from_bytes((folder / BATCH).read_bytes()).groups()


SIDES: dict[str, Callable[[Path, str, Turns], None]] = {
    "rollflow": rollflow,
    "rollflow-rows": partial(rollflow, share="none"),
    "rollflow-prompts": partial(rollflow, share="prompts"),
    "trl": trl,
    "trl-compact": trl_compact,
    "plain": plain,
}


def main() -> None:
    side, setting, folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    SIDES[side](Path(folder), setting, Turns())


if __name__ == "__main__":
    main()
