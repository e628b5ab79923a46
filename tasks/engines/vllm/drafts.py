"""Runs speculative decoding inside vLLM's core process: drafts tokens from past responses, and verifies drafts.

Every position that a draft reaches is sampled from the policy's distribution, as without a draft. A drafted token is
accepted if it equals the sample at its position. The first sample that differs from the draft ends the step and
replaces the drafted token.

- Each sampled token therefore has exactly the distribution, the log-prob and, in a seeded engine, the value that it
  would have without drafts. A drafted token is accepted with the policy's probability of the token. For drafts without
  probabilities of their own, no larger probability of acceptance is possible (Leviathan et al. 2023, arXiv 2211.17192).
- vLLM 0.32 on a CPU cannot verify drafts of sampled responses itself: its C++ version of `expand_kernel` writes the
  temperature of each drafted token into a copy, so logits are divided by memory that nobody has set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID, RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from rollflow.tasks.engines.past_responses import DraftCursor, PastResponses

PROMPT_LENGTH = ":"  # separates the prompt's length from the rest of a request's id in vLLM


class PastDrafts:
    """Proposes drafts from past responses. vLLM creates this object (`custom_class`) and calls `propose` each step."""

    def __init__(self, vllm_config: Any) -> None:
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        self._running: dict[str, tuple[bytes, DraftCursor | None]] = {}  # request id -> prompt, cursor
        self.past = PastResponses()
        self.runner: Any = None  # vLLM's model runner, which `prepare_speculation` sets

    def load_model(self, *_: Any) -> None:
        """Do nothing: these drafts need no model."""

    def propose(
        self, sampled_token_ids: Sequence[Sequence[int]], num_tokens_no_spec: Any, token_ids_cpu: Any, **_: Any
    ) -> list[list[int]]:
        """Return a draft for each request of the batch; the draft is empty if the request sampled no token."""
        ids = self.runner.input_batch.req_ids
        self._running = {id: self._running.get(id) or self._begin(id, token_ids_cpu[row]) for row, id in enumerate(ids)}
        self.past.keep_texts(prompt for prompt, _ in self._running.values())
        return [
            self._draft(id, token_ids_cpu[row], int(num_tokens_no_spec[row])) if new else []
            for row, (id, new) in enumerate(zip(ids, sampled_token_ids, strict=True))
        ]

    def _begin(self, id: str, tokens: Any) -> tuple[bytes, DraftCursor | None]:
        """Find the past responses to a request's prompt. vLLM counts a response's prefix as part of the prompt."""
        length = id.rpartition(PROMPT_LENGTH)[2]
        prompt = tokens[: int(length)].tobytes() if length.isdecimal() else b""
        return prompt, self.past.follow(prompt)

    def _draft(self, id: str, tokens: Any, count: int) -> list[int]:
        prompt, cursor = self._running[id]
        if cursor is None:
            return []
        cursor.read(tokens[len(prompt) // tokens.itemsize + cursor.length : count].tolist())
        return cursor.draft(min(self._most, self._longest - count - 1))


class DraftVerifier(RejectionSampler):  # type: ignore[misc]
    """Verifies drafts, in place of vLLM's rejection sampler.

    Notation: B requests, R rows of logits (a row for each drafted token and one more for each request), K columns (one
    more than the longest draft), V tokens.
    """

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Sample every row of `logits_RV`, and return the samples up to the first that differs from the draft."""
        device = logits.device
        drafted_B = torch.tensor(metadata.num_draft_tokens, device=device)
        starts_B = (drafted_B + 1).cumsum(0) - drafted_B - 1
        request_R = torch.repeat_interleave(drafted_B + 1)
        seeds = RowSeeds(sampling_metadata.generators, starts_B.tolist(), metadata.num_draft_tokens)
        temperature = sampling_metadata.temperature
        by_row = replace(
            sampling_metadata,
            temperature=None if temperature is None else temperature[request_R],
            generators=seeds,
        )
        made = self.sampler(logits=logits, sampling_metadata=by_row)
        columns_K = torch.arange(metadata.max_spec_len + 1, device=device)
        drafts_BK = torch.full((len(drafted_B), len(columns_K)), PLACEHOLDER_TOKEN_ID, device=device)
        drafts_BK[columns_K < drafted_B[:, None]] = metadata.draft_token_ids.to(drafts_BK.dtype)
        rows_BK = (starts_B[:, None] + columns_K).clamp(max=len(logits) - 1)
        samples_BK = made.sampled_token_ids[rows_BK, 0]
        accepted_B = (samples_BK == drafts_BK).long().cumprod(1).sum(1)
        kept_BK = columns_K <= accepted_B[:, None]
        seeds.rewind(accepted_B.tolist())
        tokens = torch.where(kept_BK, samples_BK, PLACEHOLDER_TOKEN_ID)
        return SamplerOutput(tokens.to(torch.int32), _pick_rows(made.logprobs_tensors, rows_BK.flatten()))


def _pick_rows(logprobs: LogprobsTensors | None, rows: torch.Tensor) -> LogprobsTensors | None:
    return None if logprobs is None else LogprobsTensors(*(column[rows] for column in logprobs[:3]))


class RowSeeds(dict[int, torch.Generator]):
    """The random number generators of seeded requests, by row of logits. The rows of a request share its generator.

    A sampler draws for each row in turn. `rewind` takes back the draws for rows whose samples were not used, so that a
    request uses the same random numbers as without drafts.
    """

    def __init__(
        self, generators: dict[int, torch.Generator], starts_B: Sequence[int], drafted_B: Sequence[int]
    ) -> None:
        super().__init__(
            (row, generator)
            for request, generator in sorted(generators.items())
            for row in range(starts_B[request], starts_B[request] + drafted_B[request] + 1)
        )
        self._first = {request: starts_B[request] for request in generators}
        self._after: dict[int, torch.Tensor] = {}  # the generator's state after the draw for a row

    def items(self) -> Iterator[tuple[int, torch.Generator]]:  # type: ignore[override]
        """Yield rows and generators, and note the state of each generator after the caller has drawn for the row."""
        for row, generator in super().items():
            yield row, generator
            self._after[row] = generator.get_state()

    def rewind(self, accepted_B: Sequence[int]) -> None:
        """Set each generator to its state after the last row whose sample was used."""
        for request, first in self._first.items():
            row = first + accepted_B[request]
            if row in self._after:
                self[row].set_state(self._after[row])


def prepare_speculation(runner: Any) -> None:
    """Let vLLM's model runner verify drafts by `DraftVerifier`; drafts from past responses read the runner's batch."""
    runner.rejection_sampler = DraftVerifier(runner.sampler, runner.speculative_config, runner.device)
    if isinstance(runner.drafter, PastDrafts):
        runner.drafter.runner = runner
