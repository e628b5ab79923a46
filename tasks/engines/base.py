"""Defines the contract of inference engines, which generate tokens with the weights of one policy version at a time.

Every engine gives the guarantees of this list, which `tests/contracts/test_engines.py` tests.

- Every token of a response has its log-probability under the distribution from which the token was sampled. The
  temperature is already applied. Every token also has the policy version whose weights produced the token. Within a
  response, the policy versions of the tokens never decrease.
- An engine generates no token between `suspend` and `resume`. After `suspend("continue")` running requests keep their
  tokens and continue after `resume`; after `suspend("restart")` running requests end as `ABORTED`.
- After `update(v, weights)` every new token is computed with `weights` and labelled with the policy version `v`. A
  prompt that arrives after a weight update uses no attention state (KV cache) of older weights.
- `abort` ends a request immediately: the request's `generate` returns the tokens generated so far, with the stop reason
  `ABORTED`.
- A response ends with the stop reason `STOP` at the token that completes one of the request's stop strings. The stop
  string stays in the response, and may begin in the response's prefix.
- An engine that cannot read a part of a prompt refuses the request with a `ConfigError` that names the part.
- A request with a `prefix` continues the response after the prefix, and does not sample the prefix again.
- A dead engine raises `EngineFailed` from every call, including calls that are already waiting. Only the method
  `progress` still works on a dead engine, so that another engine can continue the requests.

An engine starts without trained weights. The first call of `update` loads the weights of policy version 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

from rollflow.storage.model_input import ModelInput
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Float32s, Int32s

NO_INTS, NO_FLOATS = Int32s(), Float32s()

InFlight = Literal["continue", "restart"]


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Part of a response: its tokens, their log-probs when sampled (nats) and their policy versions, as flat arrays."""

    tokens: Int32s = NO_INTS
    logprobs: Float32s = NO_FLOATS
    versions: Int32s = NO_INTS

    @classmethod
    def of(cls, tokens: Iterable[int], logprobs: Iterable[float], versions: Iterable[int]) -> TokenSpan:
        """Build a `TokenSpan` from sequences of tokens, log-probs and policy versions."""
        return cls(Int32s.of(tokens), Float32s.of(logprobs), Int32s.of(versions))

    def __len__(self) -> int:
        return len(self.tokens.data) // Int32s.size

    def after(self, count: int) -> TokenSpan:
        """Return the part of the response after its first `count` tokens."""
        return TokenSpan(self.tokens[count:], self.logprobs[count:], self.versions[count:])

    def before(self, count: int) -> TokenSpan:
        """Return the part of the response that consists of its first `count` tokens."""
        return TokenSpan(self.tokens[:count], self.logprobs[:count], self.versions[:count])

    def __add__(self, later: TokenSpan) -> TokenSpan:
        if not later or not self:
            return self or later
        return TokenSpan(self.tokens + later.tokens, self.logprobs + later.logprobs, self.versions + later.versions)

    @classmethod
    def concatenate(cls, stretches: Iterable[TokenSpan]) -> TokenSpan:
        """Concatenate parts."""
        stretches = list(stretches)
        return cls(
            Int32s.concatenate([stretch.tokens for stretch in stretches]),
            Float32s.concatenate([stretch.logprobs for stretch in stretches]),
            Int32s.concatenate([stretch.versions for stretch in stretches]),
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one response.

    A request with the same `seed` draws the same response. The repeated response is exactly the same on the
    transformers engine, and the same up to rounding errors on a `seeded` vLLM engine. Temperature 0 means greedy
    decoding, which takes the most probable token and reports its log-prob at temperature 1. `prefix` is the beginning
    of the response, which another engine has already generated. The tokens of `prefix` count towards `max_new_tokens`
    and are part of the result. A bit-reproducible engine continues `prefix` exactly as the engine that generated
    `prefix` would have done.
    """

    id: str
    prompt: ModelInput
    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    prefix: TokenSpan = TokenSpan()
    # stop strings, which are searched in the decoded response; the prefix contains no complete stop string
    stop: tuple[str, ...] = ()
    episode: str = ""  # name of the episode of which the request is a turn; empty if no other turn follows
    earlier: int = 0  # number of tokens at the end of `prompt` that earlier turns of the episode added


@dataclass(frozen=True, slots=True)
class Generation:
    """The response to a generation request: tokens, their log-probs when sampled (nats), and their policy versions.

    `cached` is the number of prompt and prefix tokens that the engine read from its prefix cache.
    """

    id: str
    made: TokenSpan
    ending: StopReason
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
    """The location of a run's weights, in a form that is valid on every node of the cluster."""

    @property
    def patience(self) -> float | None:
        """Number of seconds that `weights` may wait for storage that does not answer; None means some minutes."""

    def weights(self, version: int) -> Path:
        """Return a local folder that contains the weights of a policy version. Fetch missing weights first."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine. The docstring of the module `base` states what every inference engine guarantees."""

    @property
    def version(self) -> int:
        """The policy version whose weights the engine uses; -1 before the first update."""

    async def start(self) -> None:
        """Load the model's architecture. Return when the inference engine is ready for the first `update`."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response. Any number of calls may run concurrently."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort the requests with these ids, and ignore unknown ids."""

    async def suspend(self, in_flight: InFlight) -> None:
        """Stop generating.

        Keep the running requests if `in_flight` is "continue", or abort the running requests if `in_flight` is
        "restart".
        """

    async def fetch(self, version: int, weights: Any) -> None:
        """Fetch weights to the engine's node while the engine generates, so that the next `update` takes less time."""

    async def update(self, version: int, weights: Any) -> None:
        """Replace the engine's weights by the weights of policy version `version`. The engine must be suspended.

        `weights` is a folder of safetensors files with Hugging Face names. For an engine that may be on another node,
        `weights` is a `WeightsSource`.
        """

    async def resume(self) -> None:
        """Continue generating."""

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        """Compute the log-probability (in nats, at temperature 1) of each of tokens[1:], given the tokens before it.

        A suspended engine can compute log-probabilities, too. Returns None if the engine has no model, as in a
        simulation.
        """

    def check(self) -> None:
        """Raise `EngineFailed` if the engine is known to be dead, without calling another process."""

    def progress(self, have: Mapping[str, int]) -> dict[str, TokenSpan]:
        """Return the tokens generated for running requests, without the first `have[id]` tokens of request `id`.

        `progress` includes the tokens of a request's prefix once the engine has computed them. `progress` of a dead
        engine returns the tokens that were known when the engine died.
        """

    async def close(self) -> None:
        """Stop the engine and every process that the engine started."""
