"""The learner contract: a trajectory batch in, the next policy version out.

- `step` is a function of the learner's state and the batch: the same state and batch give the same weights,
  bit for bit, on the same kind of machine (so any step can be replayed).
- What is not finite changes nothing: where a batch, a loss or a gradient holds a NaN or an infinity, `step` raises
  before its optimizer's step. Of several such steps in a version those before it are taken: `load` goes back.
- `state` is everything `load` needs to go on as if nothing had happened: optimizer, RNG and step count.
- `weights` are ordinary Hugging Face safetensors; tied tensors are stored once. Their names begin with `weights/`, and
  those of the state's files do not.
- `load` refuses, with `Corrupt` and one sentence, what another learner or another model gave. The learner is then as
  it was.

- `load` reads one file after the other, and holds nothing of those before: a mapping may read them when asked.

A file is given as bytes, or as a sequence of buffers that are its bytes one after the other. The buffers are views of
the tensors, valid until the next `load`, or until the next `step` calls its `settle`: before that it changes nothing
that is stored, so that a version can be stored while the next one is computed.

Each is tested once for all learners in `tests/contracts/test_learners.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rollflow.storage.batch import TrajectoryBatch
from rollflow.storage.objects import Data
from rollflow.tasks.learners.rank_orders import NEAR, RankHosts

WEIGHTS = "weights/"  # what names of weight files begin with
AGAIN = "begin another run with what `rollflow export` gives"  # the cure of what stands in a run's config, which stays


Settle = Callable[[], None]


def at_once() -> None:
    """The `Settle` of a step that nothing has to wait for."""


@dataclass(frozen=True, slots=True)
class LearnerStart:
    """What a learner begins with, beside `[train]`: the policy, and what it has to know of the run."""

    folder: Path  # a Hugging Face folder
    trained: bool  # whether it begins with the folder's weights; else untrained, of the folder's architecture
    blank: bool = False  # without any weights: whoever has it calls `load` before anything else
    dtype: str = "float32"  # of the weights that are run and published; or bfloat16
    temperature: float = 1.0  # that tokens are sampled at
    versions: int = 1  # that the run trains, for schedules
    longest: int = 1  # tokens that the policy may choose in a response
    seed: int = 0
    shard_bytes: int = 2**28  # tensors in one file
    first: Callable[[], Path] | None = None  # a folder with the weights that the run began with, for `load`
    ranks: RankHosts = NEAR


class Learner(Protocol):
    """Trains one policy. See the module's docstring for the guarantees."""

    @property
    def model(self) -> Any:
        """The policy as a transformers model in this process; a cold start trains it in place, before any `step`."""

    def step(self, batch: TrajectoryBatch, version: int, settle: Settle = at_once) -> Mapping[str, float]:
        """Train `version` into `version + 1`; returns metrics.

        Args:
            settle: called before anything is changed that is stored, and perhaps again; returns once it may be. What it
                raises ends the step, and nothing stored is changed.

        Raises:
            NotFinite: of the batch, the loss or the gradient; the message names the version, the batch and the figure.
        """

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probability (nats, temperature 1) of tokens[1:] given their prefixes."""

    def broken(self) -> str | None:
        """The name of a tensor of the weights or the state that holds a NaN or an infinity; None if all are finite."""

    def check_ranks(self) -> None:
        """To be asked while there is nothing to train.

        Raises:
            RankFailed: a process of this learner has ended, so that the next step would fail.
        """

    def weights(self) -> Mapping[str, Data]:
        """File name -> safetensors file."""

    def state(self) -> Mapping[str, Data]:
        """File name -> safetensors file."""

    def load(self, weights: Mapping[str, Data], state: Mapping[str, Data]) -> None:
        """Take over what `weights` and `state` returned.

        Raises:
            Corrupt: they are not those of this kind of learner and this model.
        """
