"""Implements `rollflow plan --from-run`, which checks the simulator against a recorded run. The command fits simulated
hardware to the run's measured times, and compares the simulated step time with the measured one.

The measured times come from the run's storage: its batches, its policy versions and its records of weight updates.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np
from rich.console import Console
from rich.text import Text

from rollflow.flows.commands.cli.alpha_choice import describe_alphas
from rollflow.flows.commands.cli.toml_edit import to_toml
from rollflow.flows.keepalive.overlap import find_overlap, read_machine
from rollflow.flows.views.pauses import paused_seconds
from rollflow.flows.views.timelines.simulation import Outputs, run_simulation
from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.errors import ConfigError
from rollflow.storage.policies import PolicyVersion
from rollflow.storage.run_records.updates import read_update
from rollflow.tasks.run.config import RunConfig
from rollflow.tasks.run.context import RunContext
from rollflow.tasks.simulation.alphas import compare_alphas
from rollflow.tasks.simulation.figures import WARM_UP
from rollflow.tasks.simulation.fit import RecordedVersion, fit_hardware
from rollflow.tasks.simulation.hardware import Hardware

FEWEST = 5  # Smallest number of policy versions after the warm-up that a comparison needs.
# Configuration keys that affect the time of a train step.
SCHEDULED = ("async_ratio", "groups", "group_size", "engine", "rollout", "reward", "rewards")


def compare(
    config: RunConfig, context: RunContext, versions: int | None, outputs: Outputs, save: Path | None = None
) -> float:
    """Simulate `config` on hardware that is fitted to the recorded run `context`. Return the relative error of the
    predicted time of a train step.

    Raises:
        ConfigError: the run has too few policy versions for a comparison.
    """
    console = Console(highlight=False)
    recorded = read_recorded(context)
    here = context.config.cluster.address == "auto"  # the run is assumed to be recorded on a machine like this one
    share = find_overlap(context.config, [read_machine()]).shared_speed if here else 1.0
    hardware = fit_hardware(recorded, context.config, share)
    if save is not None:
        save.write_text(to_toml(hardware.model_dump(exclude_defaults=True)))
        console.print(f"hardware in {save}", soft_wrap=True)
    predicted = run_simulation(config, hardware, versions or context.config.versions, outputs, console=console).figures
    measured = median(version.seconds for version in recorded)
    difference = predicted.step_median / measured - 1.0
    same = not _list_differences(config, context.config)
    console.print(
        Text.assemble(
            ("step time ", "dim"), f"measured {measured:.4g} s in run {context.run_id} (median of "
            f"{len(recorded)} versions), predicted {predicted.step_median:.4g} s",
            (f": {difference:+.1%}", "bold") if same else "",
        ),
        soft_wrap=True,
    )  # fmt: skip
    for name in _list_differences(config, context.config):
        console.print(f"the run had another {name}: the two step times cannot be compared", soft_wrap=True)
    _print_alphas(config, hardware, console)
    return difference


def _print_alphas(config: RunConfig, hardware: Hardware, console: Console) -> None:
    """Print which alpha (`async_ratio`) is best for the recipe on this machine. The alphas are simulated with the times
    of the recorded run.
    """
    if config.cluster.address != "auto":
        return  # the machines of another cluster are not known here
    overlap = find_overlap(config, [read_machine()])
    outcomes = compare_alphas(config, hardware, spread=1.0 if overlap.own else overlap.spread)
    for sentence in describe_alphas(config, overlap, outcomes):
        console.print(sentence, soft_wrap=True)


def _list_differences(config: RunConfig, other: RunConfig) -> list[str]:
    """Return the configuration keys in `SCHEDULED` whose values differ between the two configurations."""
    return [name for name in SCHEDULED if getattr(config, name) != getattr(other, name)]


def read_recorded(context: RunContext) -> list[RecordedVersion]:
    """Return the recorded times of the run's train steps after its warm-up.

    Raises:
        ConfigError: the run has too few policy versions after its warm-up.
    """
    first, newest = WARM_UP + context.config.capacity, context.policies.newest()
    if newest - first < FEWEST:
        raise ConfigError(
            f"run {context.run_id!r} has only {max(newest, 0)} versions, but a prediction needs at least "
            f"{first + FEWEST}; name a run with more versions"
        )
    return [_read_version(context, before, after) for before, after in pairwise(context.policies.since(first - 1))]


def _read_version(context: RunContext, before: PolicyVersion, after: PolicyVersion) -> RecordedVersion:
    assert after.batch_entry is not None, "only version 0 has no batch"
    update = read_update(context.store, after.number)
    file = context.batches.read_commit(after.batch_entry).file
    batch = TrajectoryBatch.from_bytes(context.batches.read(file))
    columns = batch.table.take(batch.episode_rows)
    return RecordedVersion(
        version=after.number,
        seconds=after.at - before.at - paused_seconds(context, before, after),
        waited=after.metrics["wait_seconds"],
        pause=None if update is None else update.pause_seconds,
        fetched=None if update is None else update.resumed_at - update.pause_seconds - after.at,
        groups_R=columns["index"].to_pylist(),
        tokens_R=_count_tokens(batch),
        generation_R=columns["generation_seconds"].to_pylist(),
        reward_R=columns["reward_seconds"].to_pylist(),
    )


def _count_tokens(batch: TrajectoryBatch) -> list[int]:
    """Return the number of tokens that the policy sampled in each episode, summed over the episode's branches."""
    masks = batch.table["loss_mask"].combine_chunks()
    chosen = np.concatenate([[0], np.cumsum(masks.flatten().to_numpy(zero_copy_only=False))])
    ends = masks.offsets.to_numpy()
    ends = ends - ends[0]
    counts = np.zeros(len(batch), np.int64)
    np.add.at(counts, batch.first_rows, chosen[ends[1:]] - chosen[ends[:-1]])
    found: list[int] = counts[batch.episode_rows].tolist()
    return found
