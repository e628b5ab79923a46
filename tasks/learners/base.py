"""The learner contract: a trajectory batch in, the next policy version out.

- `step` is a function of the learner's state and the batch: the same state and batch give the same weights,
  bit for bit, on the same kind of machine (so any step can be replayed).
- `state` is everything `load` needs to go on as if nothing had happened: optimizer, RNG and step count.
- `weights` are ordinary Hugging Face safetensors; tied tensors are stored once.

A file is given as bytes, or as a sequence of buffers that are its bytes one after the other. The buffers are views of
the tensors, valid until the next `step` or `load`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects import Data


class Learner(Protocol):
    """Trains one policy."""

    def step(self, batch: TrajectoryBatch, version: int) -> Mapping[str, float]:
        """Train `version` into `version + 1`; returns metrics."""

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probability (nats, temperature 1) of tokens[1:] given their prefixes."""

    def broken(self) -> str | None:
        """The name of a tensor of the weights or the state that holds a NaN or an infinity; None if all are finite."""

    def weights(self) -> Mapping[str, Data]:
        """File name -> safetensors file."""

    def state(self) -> Mapping[str, Data]:
        """File name -> safetensors file."""

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Take over what `weights` and `state` returned."""
