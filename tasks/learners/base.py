"""The learner contract: a trajectory batch in, the next policy version out.

- `step` is a function of the learner's state and the batch: the same state and batch give the same weights,
  bit for bit, on the same kind of machine (so any step can be replayed).
- NaN and infinity never reach the weights: where a batch, a loss or a gradient holds one, `step` raises before that
  optimizer step. Earlier optimizer steps of the same version have been taken by then; `load` undoes them.
- `state` is everything `load` needs to continue without a difference: optimizer, RNG and step count.
- `weights` are ordinary Hugging Face safetensors; tied tensors are stored once. Names of weight files begin with
  `weights/`, names of state files do not.
- `load` refuses files of another kind of learner or of another model: it raises `Corrupt` with one sentence, and the
  learner stays unchanged.
- `load` reads one file after the other and keeps none in memory: a mapping may read each file when it is asked for it.

A file is given as bytes, or as a sequence of buffers that are its bytes one after the other. The buffers are views of
the tensors. They stay valid until the next `load`, or until the next `step` calls its `settle`: before that call `step`
changes no stored tensor. So a version can be stored while the next one is computed.

`tests/contracts/test_learners.py` tests each sentence once for all learners.
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
AGAIN = "start another run from the policy that `rollflow export` writes"  # the fix where a run's config is at fault


WaitForPublish = Callable[[], None]


def no_wait() -> None:
    """Return at once: the `WaitForPublish` of a step that need not wait for anything."""


@dataclass(frozen=True, slots=True)
class LearnerStart:
    """The values that a learner starts with, beside `[train]`: the policy, and facts about the run."""

    folder: Path  # a Hugging Face folder
    trained: bool  # True: start with the folder's weights; False: untrained, only the folder's architecture
    blank: bool = False  # True: uninitialized weights; the caller must call `load` first
    dtype: str = "float32"  # type of the weights in use and published: float32 or bfloat16
    temperature: float = 1.0  # sampling temperature of the tokens
    versions: int = 1  # number of versions that the run trains, for schedules
    longest: int = 1  # most tokens that the policy may sample in a response
    seed: int = 0
    shard_bytes: int = 2**28  # most bytes of tensors in one file
    first: Callable[[], Path] | None = None  # returns a folder with the run's first weights, for `load`
    ranks: RankHosts = NEAR


class Learner(Protocol):
    """Train one policy. See the module's docstring for the guarantees."""

    @property
    def model(self) -> Any:
        """The policy as a transformers model in this process; a cold start trains it in place before any `step`."""

    def step(self, batch: TrajectoryBatch, version: int, settle: WaitForPublish = no_wait) -> Mapping[str, float]:
        """Train `version` into `version + 1`; return metrics.

        Args:
            settle: called before any stored tensor is changed, perhaps several times. It returns once the tensors may
                change. If it raises, the step ends and no stored tensor is changed.

        Raises:
            NotFinite: the batch, the loss or the gradient holds a NaN or an infinity; the message names the version,
                the batch and the value.
        """

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probabilities (nats, temperature 1) of tokens[1:], each given its prefix."""

    def first_nonfinite(self) -> str | None:
        """Return the name of a tensor in weights or state that holds a NaN or an infinity; None if there is none."""

    def check_ranks(self) -> None:
        """Raise if a rank has ended. Callers ask while there is nothing to train.

        Raises:
            RankFailed: a process of this learner has ended, so the next step would fail.
        """

    def weights(self) -> Mapping[str, Data]:
        """Return the weights: file name -> safetensors file."""

    def state(self) -> Mapping[str, Data]:
        """Return the learner state: file name -> safetensors file."""

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Replace weights and state by files that `weights` and `state` returned.

        Raises:
            Corrupt: the files do not belong to this kind of learner and this model.
        """
