"""Collects responses directly from vLLM's core process, because vLLM's front end makes several Python calls per
token.

Requests without a response, such as a request for log-probs, still use vLLM's front end.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import OutputProcessor

from rollflow.storage.errors import EngineFailed
from rollflow.storage.records import StopReason
from rollflow.storage.token_arrays import Float32s, Int32s
from rollflow.tasks.engines.base import NO_DRAFTS, DraftCounts, TokenSpan
from rollflow.tasks.engines.stop_strings import NO_STOPS, StopWatch

ENDINGS = {
    FinishReason.STOP: StopReason.STOP,
    FinishReason.LENGTH: StopReason.LENGTH,
    FinishReason.ABORT: StopReason.ABORTED,
}


class Response:
    """One running response, with its tokens, their log-probs and their policy versions."""

    __slots__ = ("_logprobs", "_spans", "_stepped", "_tokens", "_watch", "cached", "done", "drafts", "request")

    def __init__(self, request: EngineCoreRequest, watch: StopWatch = NO_STOPS) -> None:
        """Start an empty response to `request`, a request in vLLM's internal form.

        `watch` searches the response for stop strings.
        """
        self.request, self._watch = request, watch
        self.done: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self.cached = 0  # number of prompt tokens that vLLM read from its prefix cache
        self.drafts = NO_DRAFTS  # counted by vLLM at the end of the response
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[tuple[str, int]] = []  # pairs of a policy version and the index of its first token
        self._stepped = 0.0  # time of the last token, on the clock of vLLM's core process; 0 without metrics

    def take(self, output: Any, version: str | None) -> None:
        """Append the tokens of one generation step of vLLM, which all have the same policy version.

        Raises:
            EngineFailed: vLLM's output does not have one log-prob per token.
        """
        if tokens := output.new_token_ids:
            logprobs = output.new_logprobs.logprobs[:, 0].tolist()  # column 0 holds the log-prob of the sampled token
            if len(logprobs) != len(tokens):
                raise EngineFailed(
                    f"vLLM must return one log-prob for each token, but returned {len(tokens)} tokens and "
                    f"{len(logprobs)} log-probs"
                )
            if end := self._watch.find_end(tokens):
                tokens, logprobs = tokens[:end], logprobs[:end]
            if not self._spans or self._spans[-1][0] != version:
                self._spans.append((str(version), len(self._tokens)))
            self._tokens += tokens
            self._logprobs += logprobs
        if output.prefill_stats is not None:
            self.cached = output.prefill_stats.num_cached_tokens or 0
        if output.spec_decode_metrics is not None:
            self.drafts = _count_drafts(output.spec_decode_metrics)

    def count(self, output: Any, timestamp: float, stats: Any) -> None:
        """Add the tokens of this response to vLLM's statistics (`IterationStats`), as vLLM's front end would do."""
        stats.num_generation_tokens += len(output.new_token_ids)
        if output.prefill_stats is not None:
            stats.prompt_token_stats.update_from_output(output.prefill_stats)
        if self._stepped:
            stats.inter_token_latencies_iter.append(timestamp - self._stepped)
        else:
            stats.time_to_first_tokens_iter.append(stats.iteration_timestamp - self.request.arrival_time)
        self._stepped = timestamp

    def read_span(self, since: int = 0) -> TokenSpan:
        """Return the tokens of the response from index `since` on."""
        tokens, logprobs = self._tokens[since:], self._logprobs[since:]
        end = since + len(tokens)
        starts = [(int(version), max(start, since)) for version, start in self._spans]
        ends = [*(start for _, start in starts[1:]), end]
        # Before the first token, `ends` is longer than `starts`, which `strict=False` allows.
        spans = [Int32s.same(version, stop - start) for (version, start), stop in zip(starts, ends, strict=False)]
        return TokenSpan(Int32s.of(tokens), Float32s.of(logprobs), Int32s.concatenate(spans))

    @property
    def stopped(self) -> bool:
        """True if the response contains a stop string."""
        return self._watch.stopped

    @property
    def complete(self) -> bool:
        """True if the response has ended successfully, even if the waiting task has not run yet."""
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None

    def end(self, reason: FinishReason) -> None:
        """End the response, and pass the stop reason to the caller unless the caller was cancelled."""
        if self.done.done():
            return
        if reason in ENDINGS:
            self.done.set_result(ENDINGS[reason])
        else:
            self.done.set_exception(EngineFailed(f"vLLM ended a response for the unexpected reason {reason}"))


def _count_drafts(metrics: Any) -> DraftCounts:
    """Convert vLLM's `RequestSpecDecodeMetrics`, whose histogram counts steps by their accepted drafted tokens."""
    accepted = sum(number * steps for number, steps in enumerate(metrics.histogram))
    return DraftCounts(sum(metrics.histogram), metrics.num_draft_tokens, accepted)


class Responses(OutputProcessor):  # type: ignore[misc]
    """Output processor that replaces the output processor of vLLM's front end."""

    def __init__(self, llm: AsyncLLM, stop_ids: Sequence[int]) -> None:
        """Replace the output processor of `llm` before its first request; each token in `stop_ids` ends a response."""
        super().__init__(None, log_stats=False)
        self._llm = llm
        self._running: dict[str, Response] = {}
        self._numbers = count()  # ids for vLLM's core process, because callers may reuse ids early
        self._longest, self._vocabulary = llm.model_config.max_model_len, llm.model_config.get_vocab_size()
        self._stop_ids = list(stop_ids)
        # The parameters are cached, because building them takes a third of the time of a request.
        self._params = lru_cache(maxsize=256)(self._prepare_params)
        llm.output_processor = self

    def create(
        self,
        prompt: Int32s,
        max_new_tokens: int,
        temperature: float,
        seed: int | None,
        salt: str,
        watch: StopWatch = NO_STOPS,
        opening: int = 0,
    ) -> Response:
        """Create the response to a prompt; the caller must then call `send`.

        Requests with different values of `salt` share no KV cache. `opening` is the number of prompt tokens before the
        first response of the episode. Drafts come from past responses to these tokens.

        Raises:
            ValueError: vLLM rejects the request's prompt.
        """
        tokens, params = list(prompt), self._params(max_new_tokens, temperature)
        if not 0 < len(tokens) < self._longest or not 0 <= min(tokens) <= max(tokens) < self._vocabulary:
            self._process(tokens, params)  # vLLM's own error about an empty or too long prompt is raised here
            raise ValueError(
                f"the prompt contains a token id outside of the policy's vocabulary of {self._vocabulary} tokens"
            )
        if seed is not None:
            params = copy.copy(params)
            params.seed = seed
        id = f"rollflow-{next(self._numbers)}:{opening}"  # the module `drafts` reads `opening` from the id
        request = EngineCoreRequest(id, tokens, None, params, None, time.time(), None, salt, None)
        self._running[id] = response = Response(request, watch)
        return response

    async def send(self, response: Response) -> None:
        """Send the request of a response to vLLM's core process."""
        self._llm._run_output_handler()
        try:
            await self._llm.engine_core.add_request_async(response.request)
        except Exception:
            self._running.pop(response.request.request_id, None)
            raise

    async def abort(self, responses: Iterable[Response]) -> None:
        """Abort running responses, which keep the tokens generated so far; responses that have ended are ignored."""
        ids = [response.request.request_id for response in responses]
        running = {id: self._running.pop(id) for id in ids if id in self._running}
        for response in running.values():
            response.end(FinishReason.ABORT)
        await self._llm.engine_core.abort_requests_async(list(running))

    def process_outputs(
        self, outputs: list[Any], timestamp: float | None = None, stats: Any = None, weight_version: str | None = None
    ) -> Any:
        """Append the outputs of a generation step to their responses. vLLM calls this method after each step."""
        others, stopped = [], []
        for output in outputs:
            response = self._running.get(output.request_id)
            if response is None:
                others.append(output)
                continue
            response.take(output, weight_version)
            if stats is not None and timestamp is not None:
                response.count(output, timestamp, stats)
            if response.stopped or output.finish_reason is not None:
                del self._running[output.request_id]
                response.end(FinishReason.STOP if response.stopped else output.finish_reason)
            if response.stopped and output.finish_reason is None:
                stopped.append(output.request_id)
        done = super().process_outputs(others, timestamp, None, weight_version)  # outputs of requests for log-probs
        # vLLM's core process does not know the stop strings, so it is told to abort these requests.
        done.reqs_to_abort.extend(stopped)
        return done

    def propagate_error(self, error: Exception) -> None:
        """Raise an error at the callers of all running responses, because vLLM's core process died or was closed."""
        for response in self._running.values():
            if not response.done.done():
                response.done.set_exception(EngineFailed(f"vLLM's engine process died: {error!r}"))
        self._running.clear()
        super().propagate_error(error)

    def _prepare_params(self, max_new_tokens: int, temperature: float) -> SamplingParams:
        """Build a request's sampling parameters in the form that vLLM's core process expects."""
        params = SamplingParams(
            max_tokens=max_new_tokens,
            temperature=temperature,
            logprobs=0,
            stop_token_ids=self._stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        return self._process([0], params).sampling_params

    def _process(self, tokens: list[int], params: SamplingParams) -> Any:
        prompt = {"type": "token", "prompt_token_ids": tokens}
        return self._llm.input_processor.process_inputs("asked", prompt, params, supported_tasks=("generate",))
