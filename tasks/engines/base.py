"""The engine contract: generate tokens under one policy version at a time.

Guarantees, each tested once for all engines in `tests/contracts/test_engines.py`:

- Every token of a `Generation` carries the log-probability under the distribution it was sampled from
  (temperature applied) and the policy version whose weights produced it. Versions never decrease.
- Between `suspend` and `resume` no token is generated. After `suspend("continue")` running requests keep
  the tokens they have and go on after `resume`; after `suspend("restart")` they end as `ABORTED`.
- After `update(v, weights)` every new token is produced by these weights and labelled `v`; no
  attention state of older weights is used for a prompt that arrives after the update.
- `abort` ends a request at once: its `generate` returns what there is with the ending `ABORTED`.
- A request that comes with a `prefix` goes on from there: those tokens stay as they were sampled.
- A dead engine raises `EngineFailed` from every call, also from calls that wait already. Only `progress` goes on: it
  tells which tokens its requests had, so that another engine can take them over.

An engine is started without trained weights: the first `update` (version 0) brings them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rollflow.storage.records import Ending
from rollflow.storage.token_arrays import Float32s, Int32s

NO_INTS, NO_FLOATS = Int32s(), Float32s()

InFlight = Literal["continue", "restart"]


@dataclass(frozen=True, slots=True)
class Partial:
    """A stretch of a response: T tokens with T behaviour log-probs (nats) and T policy versions, all flat."""

    tokens: Int32s = NO_INTS
    logprobs: Float32s = NO_FLOATS
    versions: Int32s = NO_INTS

    @classmethod
    def of(cls, tokens: Iterable[int], logprobs: Iterable[float], versions: Iterable[int]) -> Partial:
        """Of numbers."""
        return cls(Int32s.of(tokens), Float32s.of(logprobs), Int32s.of(versions))

    def __len__(self) -> int:
        return len(self.tokens)

    def after(self, count: int) -> Partial:
        """All but the first `count` tokens."""
        return Partial(self.tokens[count:], self.logprobs[count:], self.versions[count:])

    def before(self, count: int) -> Partial:
        """The first `count` tokens."""
        return Partial(self.tokens[:count], self.logprobs[:count], self.versions[:count])

    def __add__(self, later: Partial) -> Partial:
        if not later or not self:
            return self or later
        return Partial(self.tokens + later.tokens, self.logprobs + later.logprobs, self.versions + later.versions)

    @classmethod
    def joined(cls, stretches: Iterable[Partial]) -> Partial:
        """One after another."""
        stretches = list(stretches)
        return cls(
            Int32s.joined([stretch.tokens for stretch in stretches]),
            Float32s.joined([stretch.logprobs for stretch in stretches]),
            Int32s.joined([stretch.versions for stretch in stretches]),
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One response to sample. The same `seed` draws the same response again: bit by bit on transformers, and up to
    rounding on a vLLM that is `seeded`.

    Temperature 0 is greedy: always the most probable token; its log-prob is then the one at temperature 1.
    `prefix` is the beginning of the response, made by another engine. Its tokens count towards `max_new_tokens` and
    stand at the head of the result. With the same seed, a reproducible engine gives the response that would have come
    without the change of engine.
    """

    id: str
    prompt: Sequence[int]  # flat, where nobody is to pay for it again
    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    prefix: Partial = Partial()


@dataclass(frozen=True, slots=True)
class Generation:
    """What came back: T tokens with T behaviour log-probs (nats) and T policy versions.

    `cached`: tokens of the prompt (and prefix) that the engine had from another request and did not compute.
    """

    id: str
    made: Partial
    ending: Ending
    cached: int = 0

    @property
    def tokens(self) -> Int32s:
        """The T tokens."""
        return self.made.tokens

    @property
    def logprobs(self) -> Float32s:
        """The T log-probs (nats)."""
        return self.made.logprobs

    @property
    def versions(self) -> Int32s:
        """The T policy versions."""
        return self.made.versions


class WeightsSource(Protocol):
    """Where a run's weights are. A small value that travels between nodes, because a path of one node means nothing on
    another.
    """

    @property
    def patience(self) -> float | None:
        """Seconds that `weights` may wait for storage that does not answer; None: some minutes."""

    def weights(self, version: int) -> Path:
        """A folder on the node of whoever asks, with the weights of a version; fetched if need be."""


@runtime_checkable
class Engine(Protocol):
    """One generation engine. See the module's docstring for the guarantees."""

    @property
    def version(self) -> int:
        """The policy version in use; -1 before the first update."""

    async def start(self) -> None:
        """Load the architecture and get ready; returns when `update` can be called."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response; may be called any number of times concurrently."""

    async def abort(self, ids: Sequence[str]) -> None:
        """End these requests now; unknown ids are ignored."""

    async def suspend(self, in_flight: InFlight) -> None:
        """Stop generating; running requests are kept or aborted."""

    async def fetch(self, version: int, weights: Any) -> None:
        """Bring the weights to the engine's node while it generates, so that `update` need not wait for them."""

    async def update(self, version: int, weights: Any) -> None:
        """Take `weights` as policy `version`; only while suspended.

        They are a folder of safetensors files (Hugging Face names); for an engine that may be on another node, a
        `WeightsSource`.
        """

    async def resume(self) -> None:
        """Go on generating."""

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        """Log-probability (nats, temperature 1) of tokens[1:] given their prefixes, also while suspended.

        None if the engine has no model.
        """

    def check(self) -> None:
        """Raise `EngineFailed` if the engine is known to be dead; costs nothing."""

    def progress(self, have: Mapping[str, int]) -> dict[str, Partial]:
        """What these requests have so far, from token `have[id]` on; ids that are not running are left out.

        A prefix counts as far as the engine has computed it. A dead engine tells what was known when it died.
        """

    async def close(self) -> None:
        """End the engine and every process it started."""
