"""The learner contract: a trajectory batch in, the next policy version out.

- `step` is a function of the learner's state and the batch: the same state and batch give the same weights,
  bit for bit, on the same kind of machine (so any step can be replayed).
- NaN and infinity never reach the weights: if a batch, a loss or a gradient contains a NaN or an infinity, `step`
  raises `NotFinite` before the optimizer step. A version may take several optimizer steps; if an error occurs between
  them, `load` restores the state before the first one.
- `state` is everything that `load` needs to continue without a difference: optimizer, RNG and step count.
- `weights` are ordinary Hugging Face safetensors; tied tensors are stored once. Names of weight files begin with
  `weights/`, and names of state files do not.
- `load` rejects files of another kind of learner or of another model: it raises `Corrupt` with one sentence, and the
  learner stays unchanged.
- `load` reads one file after the other and keeps no file in memory. The mapping that `load` gets may read a file only
  when `load` asks for that file.

The content of a file is given as bytes, or as a sequence of buffers to be joined. The buffers of a file are views of
the tensors. The buffers stay valid until the next `load`, or until the next `step` calls its `settle`. A step changes
no stored tensor before it calls `settle`. A version can be stored while the next version is computed.

`tests/contracts/test_learners.py` tests each sentence of this docstring for all learners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects import Data
from rollflow.tasks.learners.distributed.rank_protocol import NEAR, RankHosts

WEIGHTS = "weights/"  # prefix of the names of weight files
AGAIN = "start another run from the policy that `rollflow export` writes"  # the fix for a wrong config


WaitForPublish = Callable[[], None]


def no_wait() -> None:
    """Return at once: the `WaitForPublish` of a step that need not wait until the previous version is stored."""


@dataclass(frozen=True, slots=True)
class LearnerStart:
    """The values that a learner starts with, in addition to the section `[train]`."""

    folder: Path  # the policy's folder, in the format of Hugging Face
    trained: bool  # True: start with the folder's weights; False: use the folder's architecture, untrained
    blank: bool = False  # True: weights are uninitialized, and the caller must call `load` first
    dtype: str = "float32"  # data type of the policy's weights, in use and published: float32 or bfloat16
    temperature: float = 1.0  # sampling temperature of the tokens
    versions: int = 1  # number of versions that the run trains, for schedules
    longest: int = 1  # largest number of tokens that the policy may sample in a response
    seed: int = 0
    shard_bytes: int = 2**28  # largest number of bytes of tensors in one file
    first: Callable[[], Path] | None = None  # returns a folder with the weights with which the run began
    ranks: RankHosts = NEAR


class Learner(Protocol):
    """A learner trains one policy. See the module's docstring for the guarantees."""

    @property
    def model(self) -> Any:
        """The policy as a transformers model in this process; a cold start trains it before the first `step`."""

    def step(self, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> Mapping[str, float]:
        """Train `version` on a batch to obtain `version + 1`; return metrics.

        Args:
            settle: `step` calls this function, perhaps several times, before it changes a stored tensor. `settle`
                returns as soon as the tensors may change. If `settle` raises, `step` ends and no stored tensor is
                changed.

        Raises:
            NotFinite: the batch, the loss or the gradient contains a NaN or an infinity; the message names the version,
                the batch and the value.
        """

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability (nats, temperature 1) of each token after the first, given all previous tokens."""

    def first_nonfinite(self) -> str | None:
        """Return the name of a tensor in weights or state that contains a NaN or an infinity, or None."""

    def check_ranks(self) -> None:
        """Raise `RankFailed` if a rank has ended. The learner's actor calls this method while it waits for a batch.

        Raises:
            RankFailed: a process of this learner has ended, so the next step would fail.
        """

    def weights(self) -> Mapping[str, Data]:
        """Return the weights as a mapping of file names to safetensors files."""

    def state(self) -> Mapping[str, Data]:
        """Return the learner state as a mapping of file names to safetensors files."""

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Replace weights and state by files that `weights` and `state` returned.

        Raises:
            Corrupt: the files do not belong to this kind of learner and this model.
        """
