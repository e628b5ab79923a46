"""The learner contract: a trajectory batch in, the next policy version out.

- `step` is a function of the learner's state and the batch: the same state and batch give the same weights,
  bit for bit, on the same kind of machine (so any step can be replayed).
- `state` is everything `load` needs to go on as if nothing had happened: optimizer, RNG and step count.
- `weights` are ordinary Hugging Face safetensors; tied tensors are stored once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollflow.storage.batch import TrajectoryBatch


class Learner(Protocol):
    """Trains one policy."""

    def step(self, batch: TrajectoryBatch, version: int) -> Mapping[str, float]:
        """Train `version` into `version + 1`; returns metrics."""

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probability (nats, temperature 1) of tokens[1:] given their prefixes."""

    def weights(self) -> Mapping[str, bytes]:
        """File name -> safetensors bytes."""

    def state(self) -> Mapping[str, bytes]:
        """File name -> safetensors bytes."""

    def load(self, weights: Mapping[str, bytes], state: Mapping[str, bytes]) -> None:
        """Take over what `weights` and `state` returned."""
