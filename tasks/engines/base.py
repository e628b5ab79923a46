"""Defines the contract of inference engines, which generate tokens with the weights of one policy version at a time.

`tests/contracts/test_engines.py` tests the guarantees of all engines:

- Each token has its log-probability after temperature is applied, and the policy version whose weights produced it.
  Within a response, the policy versions of the tokens never decrease.
- An engine generates no token between `suspend` and `resume`. Running requests continue after `suspend("continue")` and
  `resume`; `suspend("restart")` ends them as `ABORTED`.
- After `update(v, weights)`, every new token is computed with `weights` and has the policy version `v`. A prompt that
  arrives after a weight update uses no KV cache of older weights.
- `abort` ends a request immediately: its `generate` returns the tokens generated so far, with the stop reason
  `ABORTED`.
- A response ends with the stop reason `STOP` at the token that completes a stop string; the stop string stays in the
  response.
- An engine that cannot read a part of a prompt raises a `ConfigError` that names the part.
- A request with a `prefix` continues after the prefix.
- A dead engine raises `EngineFailed` from every call except `progress`. Another engine can continue its requests after
  the tokens that `progress` returns.

An engine starts without trained weights; the first `update` loads the weights of policy version 0.
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
        """Concatenate parts of a response."""
        stretches = list(stretches)
        return cls(
            Int32s.concatenate([stretch.tokens for stretch in stretches]),
            Float32s.concatenate([stretch.logprobs for stretch in stretches]),
            Int32s.concatenate([stretch.versions for stretch in stretches]),
        )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request for one response.

    Equal requests with the same `seed` get the same response: exactly on the transformers engine, and up to rounding on
    a `seeded` vLLM engine. Temperature 0 means greedy decoding, with log-probs at temperature 1. `prefix` is the
    beginning of the response, which another engine has generated. Tokens of `prefix` count towards `max_new_tokens` and
    are part of the result.
    """

    id: str
    prompt: ModelInput
    max_new_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    prefix: TokenSpan = TokenSpan()
    # stop strings, searched in the decoded response; the prefix contains no complete stop string
    stop: tuple[str, ...] = ()
    episode: str = ""  # name of the episode of which the request is a turn; empty if no other turn follows
    earlier: int = 0  # number of tokens at the end of `prompt` that earlier turns of the episode added


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Counts of speculative decoding: steps that verified a draft, drafted tokens, and accepted drafted tokens.

    A step that verifies a draft samples the accepted tokens and one more.
    """

    verified: int = 0
    drafted: int = 0
    accepted: int = 0

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.verified + other.verified, self.drafted + other.drafted, self.accepted + other.accepted)

    @property
    def length(self) -> float:
        """The mean number of tokens that a step with a draft sampled."""
        return 1 + self.accepted / max(self.verified, 1)


NO_DRAFTS = DraftCounts()


@dataclass(frozen=True, slots=True)
class Generation:
    """The response to a generation request: tokens, their log-probs when sampled (nats), and their policy versions.

    `cached` is the number of prompt and prefix tokens that came from the engine's prefix cache. `drafts` counts the
    drafts of a response that was not aborted and did not end at a stop string.
    """

    id: str
    made: TokenSpan
    ending: StopReason
    cached: int = 0
    drafts: DraftCounts = NO_DRAFTS

    @property
    def tokens(self) -> Int32s:
        """The T tokens of the response."""
        return self.made.tokens

    @property
    def logprobs(self) -> Float32s:
        """The T log-probs of the tokens (nats)."""
        return self.made.logprobs

    @property
    def versions(self) -> Int32s:
        """The T policy versions of the tokens."""
        return self.made.versions


class WeightsSource(Protocol):
    """The location of a run's weights, in a form that is valid on every node of the cluster."""

    @property
    def patience(self) -> float | None:
        """Number of seconds that `weights` may wait for storage that does not answer; None means a few minutes."""

    def weights(self, version: int) -> Path:
        """Return a local folder with the weights of a policy version; missing weights are fetched first."""


@runtime_checkable
class Engine(Protocol):
    """An inference engine; the module's docstring lists its guarantees."""

    @property
    def version(self) -> int:
        """The policy version whose weights the engine uses; -1 before the first update."""

    async def start(self) -> None:
        """Load the architecture of the model; return when the engine is ready for the first `update`."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Sample one response; any number of calls may run concurrently."""

    async def abort(self, ids: Sequence[str]) -> None:
        """Abort the requests with these ids, and ignore unknown ids."""

    async def suspend(self, in_flight: InFlight) -> None:
        """Stop generating.

        With `in_flight = "continue"` running requests are kept; with "restart" they are aborted.
        """

    async def fetch(self, version: int, weights: Any) -> None:
        """Fetch weights to the engine's node while the engine generates, so that the next `update` takes less time."""

    async def update(self, version: int, weights: Any) -> None:
        """Replace the weights of the suspended engine by those of policy version `version`.

        `weights` is a folder of safetensors files with Hugging Face names, or a `WeightsSource` for an engine on
        another node.
        """

    async def resume(self) -> None:
        """Continue generating."""

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        """Compute the log-probability (in nats, at temperature 1) of each of tokens[1:], given the tokens before it.

        A suspended engine can compute log-probabilities, too. A simulated engine has no model and returns None.
        """

    def check(self) -> None:
        """Raise `EngineFailed` if the engine is known to be dead, without calling another process."""

    def progress(self, have: Mapping[str, int]) -> dict[str, TokenSpan]:
        """Return the tokens generated for running requests, without the first `have[id]` tokens of request `id`.

        Tokens of a prefix are included once the engine has computed them. On a dead engine, `progress` returns the
        tokens that were known when the engine died.
        """

    async def close(self) -> None:
        """Stop the engine and every process that the engine started."""
