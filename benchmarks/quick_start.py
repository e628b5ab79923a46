"""Measures the accuracy of the quick start on exported folders, with plain transformers: one run per seed.

    python -m benchmarks.quick_start [--seeds 0 1 2] [--home FOLDER] [--json FILE]

There are two held-out sets. The run evaluates itself on the first set. The second set has the other held-out questions
of the source; no setting was tuned on it. Training uses no question of either set. To prove this, the benchmark counts
held-out keys (identities of questions) at all positions of the source that the run may have used. Version 0 and the
last version are exported with `rollflow export`, loaded by `AutoModelForCausalLM` and `AutoTokenizer`, and decoded
greedily. Runs are kept in `--home`; an existing run is reused.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import Row, arguments, at_least, at_most, publish
from rollflow.flows.locations import attach_run
from rollflow.tasks.policies.demonstrations import POOL
from rollflow.tasks.prompts.base import Question
from rollflow.tasks.run.context import RunContext

Asked = Sequence[tuple[str, str]]  # questions and their correct answers
ALL = 10**9  # a number that is larger than the number of held-out questions of any source
BEFORE, AFTER, MINUTES = 35.0, 85.0, 5.0  # targets: accuracy in percent before and after, and minutes
ROLLFLOW = Path(sys.executable).with_name("rollflow")


def main() -> None:
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--recipe", type=Path, default=Path("flows/recipes/sorting.toml"))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--home", type=Path, default=Path(".rollflow/quick_start"), help="run home of the runs")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: list[Row] = []
    for seed in options.seeds:
        home = (options.home / f"seed-{seed}").absolute()
        found += rows(seed, home, options.recipe, [*options.set, f"seed={seed}"])
    publish(found, "The quick start, by plain transformers on the exported folder", options.json)


def rows(seed: int, home: Path, recipe: Path, changes: Sequence[str]) -> Iterator[Row]:
    """Return all rows of one seed."""
    case, summary = f"seed {seed}", run(home, recipe, changes)
    context = attach_run(summary["storage"])
    first, second = split_held_out(context)
    yield at_most(case, "keys in both training and a held-out set", count_shared_keys(context, [*first, *second]), 0)
    for version, when in ((0, "before"), (summary["versions"], "after")):
        folder = export_version(home, version)
        for name, questions in (("first", first), ("second", second)):
            percent = 100 * measure_accuracy(
                folder, [(q.text, q.answer) for q in questions], context.config.engine.max_new_tokens
            )
            metric = f"{name} set ({len(questions)}), {when} (%)"
            yield (at_most if version == 0 else at_least)(case, metric, percent, AFTER if version else BEFORE)
    yield Row(case, "first set, before, by the run itself (%)", 100 * summary["accuracy"]["before"])
    yield Row(case, "first set, after, by the run itself (%)", 100 * summary["accuracy"]["after"])
    yield at_most(case, "minutes of the whole command", summary["minutes"], MINUTES)


def run(home: Path, recipe: Path, changes: Sequence[str]) -> dict[str, Any]:
    """Return the summary of the run in `home`, with the minutes of the command; execute a missing run."""
    kept = home / "quick_start.json"
    if not kept.exists():
        options = [word for change in changes for word in ("--set", change)]
        began = time.monotonic()
        rollflow(home, "run", str(recipe), "--run-id", "run", *options)
        minutes = (time.monotonic() - began) / 60
        [file] = home.glob("**/runs/run/summary.json")
        summary = {**json.loads(file.read_text()), "storage": str(file.parent), "minutes": minutes}
        kept.write_text(json.dumps(summary))
    return dict(json.loads(kept.read_text()))


def rollflow(home: Path, *arguments: str) -> None:
    """Run the command `rollflow` with the run home `home`, and keep its output there."""
    home.mkdir(parents=True, exist_ok=True)
    with open(home / "output.txt", "a") as output:
        command, environment = [str(ROLLFLOW), *arguments], {**os.environ, "ROLLFLOW_HOME": str(home)}
        subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=True)


def export_version(home: Path, version: int) -> Path:
    """Export a version of the run to a folder, and return it."""
    folder = home / f"version-{version}"
    if not folder.exists():
        rollflow(home, "export", "run", str(version), str(folder))
    return folder


def split_held_out(context: RunContext) -> tuple[list[Question], list[Question]]:
    """Return the questions on which the run evaluates itself, and the source's other held-out questions."""
    [source] = context.prompts().sources
    held, count = source.held_out(ALL), context.config.evaluation.prompts
    return held[:count], held[count:]


def count_shared_keys(context: RunContext, held: Sequence[Question]) -> int:
    """Count the held-out keys at all prompt positions that training or the cold start may have used."""
    [source], config = context.prompts().sources, context.config
    ahead = config.capacity + 1  # largest number of batches in flight when the last version is published
    asked = {source.training(place).canonical_key for place in range((config.versions + ahead) * config.groups)}
    asked |= {source.demonstration(place).canonical_key for place in range(POOL)}
    return len(asked & {question.canonical_key for question in held})


@torch.no_grad()
def measure_accuracy(folder: Path, asked: Asked, longest: int) -> float:
    """Return the greedy accuracy of the model in `folder`, loaded by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    by_length: dict[int, list[tuple[list[int], str]]] = {}  # grouped by length, so that no row of a batch is padded
    for question, answer in asked:
        prompt = tokenizer(question)["input_ids"]
        by_length.setdefault(len(prompt), []).append((prompt, answer))
    right = 0
    for length, rows in by_length.items():
        prompts = torch.tensor([prompt for prompt, _ in rows])
        made = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, max_new_tokens=longest)
        said = tokenizer.batch_decode(made[:, length:], skip_special_tokens=True)
        right += sum(text == answer for text, (_, answer) in zip(said, rows, strict=True))
    return right / len(asked)


if __name__ == "__main__":
    main()
