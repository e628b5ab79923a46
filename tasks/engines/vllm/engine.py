"""Runs vLLM (`AsyncLLM`) as an inference engine.

- Every token is computed from the weights of a single policy version: a weight update computes the KV cache of running
  requests again.
- The engine never samples from a distribution that is truncated by top_p or top_k.
- Responses to a prompt share the KV cache of the prompt, but never across policy versions.
- No process of the engine outlives the process that created the engine (see `worker`), or listens outside of the
  loopback interface.

The engine starts with random weights, so the policy's folder needs only `config.json`. The engine is not
bit-reproducible, because rounding depends on the batch; a `seeded` engine draws the same tokens up to rounding. Seeds
reduce throughput, so engines are seeded only in runs that may preempt unfinished responses. A `seeded` engine on a CPU
processes a prompt in one step, because a seeded request with a chunked prefill crashes vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing.forkserver
import os
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollflow.storage.errors import EngineFailed
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, TokenSpan
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.engines.runnable import check_gpu_memory, check_head_size
from rollflow.tasks.engines.speculation import PastFeed, PastResponse, ReadPast
from rollflow.tasks.engines.stop_strings import watch_stops
from rollflow.tasks.engines.vllm.arguments import build_arguments, build_vllm_config
from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.policies.stop import stop_tokens
from rollflow.tasks.runtime.fork_server import fork_server
from rollflow.tasks.runtime.gc_tuning import pause_collector, spare_collector
from rollflow.tasks.runtime.node import find_interface

if TYPE_CHECKING:
    from rollflow.tasks.engines.vllm.responses import Response, Responses

START_SECONDS = 600.0
CALL_SECONDS = 50.0  # deadline, in seconds, of `suspend`, `resume` and `abort`, which take milliseconds
UPDATE_SECONDS = 120.0
DEATH_SECONDS = 0.2  # seconds between two checks that vLLM's process is alive, while a call waits for an answer
REMEMBERED_AT_ONCE = 4096  # largest number of past responses in one message to vLLM's process
# The named module is imported in the process from which vLLM's core processes are forked.
CORE_IMPORTS = "rollflow.tasks.engines.vllm.imports"


class VllmEngine:
    """An inference engine that runs vLLM and vLLM's processes."""

    def __init__(
        self,
        config: VllmEngineConfig,
        policy_folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seeded: bool = False,
        repair_tied_head: bool = True,
        told_as: str = "",
        read_past: ReadPast | None = None,
    ) -> None:
        """Create a vLLM engine; `start` starts vLLM's processes.

        Args:
            repair_tied_head: if True, vLLM's copy of the output head is recomputed after each load of weights. A test
                passes False to show that comparing log-probs detects a stale output head.
            told_as: this is the `model_name` in vLLM's own metrics, which Ray collects. If `told_as` is "", vLLM
                reports no metrics.
            read_past: this function returns past responses that it has not returned before, for
                `engine.speculation = "suffix"`. The engine calls it in a thread, at its start and at weight updates.
        """
        self._config = config
        self._folder = policy_folder
        self._dtype = dtype
        self._seeded = seeded
        self._repair_tied_head = repair_tied_head
        self._told_as = told_as
        self._past = PastFeed(read_past if config.speculation == "suffix" else None, self.remember)
        self._stop_ids = tuple(stop_tokens(policy_folder))
        self._version = -1
        self._suspended = False
        self._probes = 0
        self._running: dict[str, tuple[TokenSpan, Response]] = {}  # id -> prefix, response
        self._llm: Any = None
        self._responses: Responses

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        from torch.cuda import is_available

        check_head_size(self._folder, str(self._folder), is_available)
        check_gpu_memory(self._config, is_available)
        with _environment(self._config.threads, speculates=self._config.speculation != "none"):
            async with asyncio.timeout(START_SECONDS):
                self._llm = await asyncio.to_thread(self._build_llm)
            self._responses = _create_responses(self._llm, self._stop_ids)
            await self._call_workers("prepare_policy_worker")
        self._past.refresh()
        spare_collector()  # without this call, a full garbage collection would spend 0.4 s on vLLM's modules

    def _build_llm(self) -> Any:
        from torch.cuda import is_available

        with pause_collector():
            disable_optional_libraries()
            _fork_cores()
            from vllm.v1.engine.async_llm import AsyncLLM

        config, seeded, told_as = self._config, self._seeded, self._told_as
        arguments = build_arguments(
            config, self._folder, dtype=self._dtype, seeded=seeded, told_as=told_as, gpu=is_available()
        )
        # vLLM prints no statistics, but passes them to its loggers.
        loggers = [_enable_ray_logger()] if told_as else []
        vllm_config = build_vllm_config(config, arguments)
        return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=loggers, disable_log_stats=True)

    async def generate(self, request: GenerationRequest) -> Generation:
        self.check()
        if request.id in self._running:
            raise ValueError(f"request {request.id!r} is already running; give each request its own id")
        prefix, prompt = request.prefix, request.prompt.read_tokens("the vLLM engine")
        with self._translate_death():
            response = self._responses.create(
                prompt + prefix.tokens,
                request.max_new_tokens - len(prefix),
                request.temperature,
                self._derive_seed(request),
                str(self._version),
                watch_stops(request.stop, self._folder, prefix.tokens),
                len(prompt) - request.earlier,
            )
            self._running[request.id] = prefix, response
            try:
                await self._responses.send(response)
                ending = await response.done
            except asyncio.CancelledError:
                await self._responses.abort([response])
                raise
            finally:
                if self._llm is not None and not self._llm.errored:
                    del self._running[request.id]
        return Generation(request.id, prefix + response.read_span(), ending, response.cached, response.drafts)

    def _derive_seed(self, request: GenerationRequest) -> int | None:
        """Return the seed for vLLM. The seed depends on the length of the prefix, so that a continued response uses no
        random number twice.
        """
        if not self._seeded or request.seed is None:
            return None
        return (request.seed + len(request.prefix)) % 2**63

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._suspended:
            return tuple((await self._call_workers("prompt_logprobs_while_paused", list(tokens)))[0])
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._probes += 1
        prompt = {"type": "token", "prompt_token_ids": list(tokens), "cache_salt": str(self._version)}
        self.check()
        with self._translate_death():
            async for output in self._llm.generate(prompt, params, f"probe-{self._probes}"):
                rows = output.prompt_logprobs[1:]
        return tuple(row[token].logprob for row, token in zip(rows, tokens[1:], strict=True))

    async def abort(self, ids: Sequence[str]) -> None:
        self.check()
        running = [self._running[id][1] for id in ids if id in self._running]
        await self._wait_answer(self._responses.abort(running))

    async def suspend(self, in_flight: InFlight) -> None:
        self.check()
        mode = "keep" if in_flight == "continue" else "abort"
        # vLLM's `pause_generation` would leave the engine idle for 20 ms more at every update.
        await self._wait_answer(self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True))
        self._suspended = True

    async def fetch(self, version: int, weights: Path) -> None:
        pass  # the weights are on this node

    async def update(self, version: int, weights: Path) -> None:
        await self._call_workers("load_policy", str(weights), self._repair_tied_head, seconds=UPDATE_SECONDS)
        await self._wait_answer(self._llm.update_weight_version(str(version)))
        self._version = version
        self._past.refresh()

    async def remember(self, past: Sequence[PastResponse]) -> None:
        """Keep past responses, oldest first, from which the engine drafts (`engine.speculation = "suffix"`)."""
        for start in range(0, len(past), REMEMBERED_AT_ONCE):
            prompts, responses = zip(*past[start : start + REMEMBERED_AT_ONCE], strict=True)
            await self._call_workers("remember", list(prompts), list(responses))

    async def resume(self) -> None:
        self.check()
        await self._wait_answer(self._llm.resume_generation())
        self._suspended = False

    def check(self) -> None:
        if self._llm is None:
            raise EngineFailed("the vLLM engine cannot be used, because it was closed or never started")
        if self._llm.errored:
            raise EngineFailed("vLLM's engine process died")

    def progress(self, have: Mapping[str, int]) -> dict[str, TokenSpan]:
        running = [(id, *self._running[id], since) for id, since in have.items() if id in self._running]
        return {
            id: prefix.after(since) + response.read_span(max(0, since - len(prefix)))
            for id, prefix, response, since in running
            if not response.complete  # `generate` returns a complete response, so `progress` leaves it out
        }

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        self._past.close()
        if llm is not None:
            # Waiting callers get the error, because they would otherwise wait forever.
            llm.output_processor.propagate_error(llm.dead_error)
            await asyncio.to_thread(llm.shutdown)
            llm.shutdown = lambda: None  # without this, vLLM's `__del__` would call `shutdown` again and fail
            gc.unfreeze()

    async def _call_workers(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> list[Any]:
        """Call a method of all vLLM workers, and return the answer of each worker."""
        self.check()
        results: list[Any] = await self._wait_answer(self._llm.collective_rpc(method, args=arguments), seconds)
        return results

    async def _wait_answer(self, call: Awaitable[Any], seconds: float = CALL_SECONDS) -> Any:
        """Wait for an answer of vLLM, and check that its process is alive, because vLLM waits forever for a dead
        process."""
        asked = asyncio.ensure_future(call)
        try:
            with self._translate_death():
                async with asyncio.timeout(seconds):
                    while not (await asyncio.wait([asked], timeout=DEATH_SECONDS))[0]:
                        self.check()
                return asked.result()
        except TimeoutError as error:
            raise EngineFailed(f"vLLM's engine process did not answer within {seconds:.0f} s") from error
        finally:
            asked.cancel()

    @contextmanager
    def _translate_death(self) -> Iterator[None]:
        """Translate vLLM's errors about a dead engine into `EngineFailed`."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"vLLM's engine process died: {error}") from error
        except VLLMClientError as error:
            raise ValueError(str(error)) from None  # a `ValueError` can be unpickled by a process without vLLM


def _enable_ray_logger() -> Any:
    """Let vLLM report metrics through Ray, and return the logger with which vLLM does so."""
    from vllm.v1.metrics import ray_wrappers

    if ray_wrappers.ray_metrics is None:  # vLLM sets `ray_metrics` to None if Ray Serve is not installed
        ray_wrappers.ray_metrics = import_module("ray.util.metrics")
    return ray_wrappers.RayPrometheusStatLogger


def _create_responses(llm: Any, stop_ids: tuple[int, ...]) -> Responses:
    from rollflow.tasks.engines.vllm.responses import Responses

    return Responses(llm, stop_ids)


def import_early() -> None:
    """Import the modules that vLLM on a CPU needs, and start the process from which vLLM's core processes are
    forked.

    A forked core process does not have to import vLLM's modules. The calling process must not have started threads.
    """
    with _environment(1):
        import_module(CORE_IMPORTS)
        with pause_collector():
            disable_optional_libraries()
            import_module("vllm.engine.arg_utils")
            import_module("vllm.v1.engine.async_llm")
        fork_server([CORE_IMPORTS])


def _fork_cores() -> None:
    """Let vLLM on a CPU fork its core process from a process that has already imported vLLM, because imports take most
    of the start-up time.

    On a GPU, `_fork_cores` does nothing, because vLLM must start a new Python interpreter.
    """
    from torch.cuda import is_available

    if is_available():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([CORE_IMPORTS])
    multiprocessing.forkserver.ensure_running()
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: context


@contextmanager
def _environment(threads: int, *, speculates: bool = False) -> Iterator[None]:
    """Set the environment variables that vLLM's processes read at their start, and restore the variables afterwards."""
    from torch.cuda import is_available

    before = dict(os.environ)
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # vLLM itself would choose "spawn" inside a Ray actor
    }
    if not is_available():
        os.environ |= {
            "VLLM_TARGET_DEVICE": "cpu",
            # Threads are not pinned, because a pinned thread would wait whenever the learner uses its core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
        }
    if speculates:  # the module `drafts` works only with the first version of vLLM's model runner
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    # By default gloo would listen at the address of the machine's host name, which other machines can reach.
    if loopback := find_interface("127.0.0.1"):
        os.environ |= {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
