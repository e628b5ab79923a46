"""Sets random generators and torch's deterministic algorithms, so that a learner's results can be reproduced.

On a single CPU thread, results of torch are always bit-identical. Without the option `deterministic`, a GPU may add up
numbers in a different order each time. With the option `deterministic`, torch uses only algorithms that add in a fixed
order, and raises an error if an operation has none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollflow.tasks.learners.config import TrainBase
from rollflow.tasks.policies.device import fix_workspace

RNG, DEVICE_RNG = "rng", "device_rng"  # keys of the random generators' states in the learner state


def begin_process(config: TrainBase, seed: int) -> None:
    """Set the threads, the random seed and the algorithms of torch; call this before the process uses a device."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        fix_workspace()
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow and not needed


def random_state(config: TrainBase, device: torch.device) -> dict[str, Tensor]:
    """Return the state of the CPU's random generator, and with `deterministic` also the state of the GPU's
    generator."""
    found = {RNG: torch.get_rng_state()}
    if config.deterministic and device.type == "cuda":
        found[DEVICE_RNG] = torch.cuda.get_rng_state(device)
    return found


def random_like(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return placeholders for the states of random generators that `saved` should contain, by name."""
    found = {RNG: torch.get_rng_state()}
    return found | ({DEVICE_RNG: saved[DEVICE_RNG]} if DEVICE_RNG in saved else {})


def take_random(drawn: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the random generators to the states in `drawn`. Without a GPU, the state of the GPU's generator is
    ignored."""
    torch.set_rng_state(drawn[RNG])
    if DEVICE_RNG in drawn and device.type == "cuda":
        torch.cuda.set_rng_state(drawn[DEVICE_RNG], device)
