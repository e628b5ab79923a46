"""The interface of a learner, which trains the policy: it turns a batch of trajectories into the next policy
version.

A train step depends only on the learner's state and the batch. The same state and batch give bit-identical weights on
the same kind of machine, so any train step can be replayed. NaN and infinity never reach the weights. If a batch, a
loss or a gradient contains a NaN or an infinity, `step` raises `NotFinite` before the optimizer step. A train step may
take several optimizer steps. If a train step fails after an optimizer step, `load` restores the state from before the
train step.

The learner's state contains everything that `load` needs to continue training with bit-identical results. The learner's
weights are ordinary Hugging Face safetensors files, in which tied tensors are stored once. Names of weight files begin
with `weights/`, and names of state files do not.

`load` reads one file after the other, and keeps no file in memory. If files belong to another kind of learner or to
another model, `load` raises `Corrupt`, and the learner stays unchanged.

Stored files are views of the learner's tensors. A file stays valid until the next `load`, or until the next `step`
calls its argument `settle`. The function `settle` waits until the previous policy version is stored, and a train step
changes no stored tensor before it calls `settle`. So a policy version can be stored while the next policy version is
computed.

`tests/contracts/test_learners.py` tests each sentence of this docstring for all kinds of learners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects import Data
from rollflow.tasks.learners.distributed.rank_protocol import NEAR, RankHosts

WEIGHTS = "weights/"  # prefix of the names of the policy's weight files
AGAIN = "start another run from the policy that `rollflow export` writes"  # the fix in error messages about a NaN


WaitForPublish = Callable[[], None]


def no_wait() -> None:
    """Return at once. `no_wait` is the default of the argument `settle` of `Learner.step`."""


@dataclass(frozen=True, slots=True)
class LearnerStart:
    """The values with which a learner starts, in addition to the configuration section `[train]`."""

    folder: Path  # the policy's folder, in the format of Hugging Face
    # True: the learner starts with the weights in the folder; False: with random weights of the folder's architecture
    trained: bool
    blank: bool = False  # True: the weights are uninitialized, and the caller must call `load` first
    dtype: str = "float32"  # data type of the policy's weights: float32 or bfloat16
    temperature: float = 1.0  # sampling temperature at which the trained tokens were sampled
    versions: int = 1  # number of policy versions that the run trains, used by learning-rate schedules
    longest: int = 1  # largest number of tokens that the policy may sample in a response
    seed: int = 0
    shard_bytes: int = 2**28  # largest number of bytes of tensors in one safetensors file
    first: Callable[[], Path] | None = None  # returns a folder with the first weights of the run
    ranks: RankHosts = NEAR


class Learner(Protocol):
    """The interface of all learners. A learner trains one policy."""

    @property
    def model(self) -> Any:
        """The policy as a transformers model in this process. A cold start (supervised training) trains the model
        before the first `step`."""

    def step(self, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> Mapping[str, float]:
        """Train policy version `version` on a batch to obtain policy version `version + 1`; return metrics.

        Args:
            settle: `step` calls this function, perhaps several times, before it changes a stored tensor. The function
                `settle` returns as soon as stored tensors may change, that is, when the previous policy version is
                stored. If `settle` raises an error, `step` ends without changing a stored tensor.

        Raises:
            NotFinite: the batch, the loss or the gradient contains a NaN or an infinity. The error message names the
                policy version, the batch and the value.
        """

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability (nats, temperature 1) of each token after the first, given all previous tokens."""

    def first_nonfinite(self) -> str | None:
        """Return the name of a tensor of the weights or the learner state that contains a NaN or an infinity, or
        None."""

    def check_ranks(self) -> None:
        """Raise `RankFailed` if one of the learner's ranks (processes) has ended. The learner's Ray actor calls
        `check_ranks` while it waits for a batch.

        Raises:
            RankFailed: a process of this learner has ended, so the next step would fail.
        """

    def weights(self) -> Mapping[str, Data]:
        """Return the policy's weights as a mapping of file names to safetensors files."""

    def state(self) -> Mapping[str, Data]:
        """Return the learner state as a mapping of file names to safetensors files."""

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Replace the policy's weights and the learner state by files that the methods `weights` and `state` returned.

        Raises:
            Corrupt: the files do not belong to this kind of learner and this model.
        """
