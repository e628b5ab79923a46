"""What a learner's numbers depend on beside its tensors: random generators, and which algorithms torch may choose.

On one thread of a processor torch gives the same bits without `deterministic`, and with it. On a GPU it adds up in
another order each time: `index_add` of sequence ratios, the gradients of embeddings, of attention, and of hidden states
that are picked more than once. With it torch takes an order of its own there, or raises where it has none.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollflow.tasks.learners.config import Ranked
from rollflow.tasks.policies.device import fix_workspace

RNG, DEVICE_RNG = "rng", "device_rng"  # in a learner's state


def begin_process(config: Ranked, seed: int) -> None:
    """Threads, seed and algorithms of this process; to be called before it uses a device."""
    torch.set_num_threads(config.threads)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(config.deterministic)
    if config.deterministic:
        fix_workspace()
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # slow; nobody reads such


def random_state(config: Ranked, device: torch.device) -> dict[str, Tensor]:
    """The processor's generator; that of the device, too, where it is to be deterministic and is another one."""
    found = {RNG: torch.get_rng_state()}
    if config.deterministic and device.type == "cuda":
        found[DEVICE_RNG] = torch.cuda.get_rng_state(device)
    return found


def random_like(saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `saved` should have: another machine than this one may have had a device, or none."""
    found = {RNG: torch.get_rng_state()}
    return found | ({DEVICE_RNG: saved[DEVICE_RNG]} if DEVICE_RNG in saved else {})


def take_random(drawn: Mapping[str, Tensor], device: torch.device) -> None:
    """Go on drawing where `random_state` was; a device's generator is left alone where there is no such device."""
    torch.set_rng_state(drawn[RNG])
    if DEVICE_RNG in drawn and device.type == "cuda":
        torch.cuda.set_rng_state(drawn[DEVICE_RNG], device)
