"""Generation with vLLM's `AsyncLLM`.

Guarantees, beyond the contract in `base`:

- A token of version v was computed from the weights of v alone: an update recomputes the attention state of
  the running requests too (vLLM preempts them when it clears its caches).
- The engine never samples from a truncated distribution, and the log-probs are those after temperature.
- A prompt's attention state is shared by the responses to it, never across versions: an update empties the prefix
  cache, and its entries are salted with the version under which their request came.
- No process of the engine outlives its owner (`vllm_worker`).

The model starts with random weights from `config.json` alone; neither weights nor a tokenizer are needed. Not
bit-reproducible: rounding depends on the batch. With `seeded`, a request that is sent again draws the same tokens, up
to that rounding. That costs some throughput (a random number for each request and step), so only runs that may give
groups up use it. On a CPU a seeded engine takes all tokens of a prompt in one step: a seeded request with a chunked
prefill kills vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import json
import multiprocessing.forkserver
import os
import secrets
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from rollflow.storage.errors import ConfigError, EngineFailed
from rollflow.storage.records import Ending
from rollflow.tasks.engines.base import Generation, GenerationRequest, InFlight, Partial
from rollflow.tasks.engines.config import VllmEngineConfig
from rollflow.tasks.policies.stop import stop_tokens

CPU_KV_CACHE_BYTES = 256 << 20
CPU_BLOCK_TOKENS = 32  # the smallest its attention kernel takes: only whole blocks of a prompt are shared
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
START_SECONDS = 600.0
CALL_SECONDS = 50.0  # for suspend, resume, abort: they take milliseconds unless the engine hangs
UPDATE_SECONDS = 120.0
DEATH_SECONDS = 0.2  # between two looks whether an engine that was asked something still lives
WORKER = "rollflow.tasks.engines.vllm_worker"
CORE_IMPORTS = [  # what vLLM's core process needs on a CPU; an incomplete list costs time, nothing else
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    WORKER,
]
ENDINGS = {"stop": Ending.STOP, "length": Ending.LENGTH, "abort": Ending.ABORTED}


class VllmEngine:
    """One vLLM engine and its processes. See `base.Engine` for the methods' contract."""

    def __init__(
        self,
        config: VllmEngineConfig,
        policy_folder: Path,
        *,
        dtype: Literal["float32", "bfloat16"] = "float32",
        seeded: bool = False,
        compile: bool | None = None,
        repair_tied_head: bool = True,
    ) -> None:
        """`compile` (default: on a GPU only) costs about 20 s of start and gains nothing on small CPU models;
        `repair_tied_head=False` exists to show that the probe catches vLLM's stale output head."""
        self._config = config
        self._folder = policy_folder
        self._dtype = dtype
        self._seeded = seeded
        self._compile = compile
        self._repair_tied_head = repair_tied_head
        self._stop_ids = tuple(stop_tokens(policy_folder))
        self._version = -1
        self._suspended = False
        self._probes = 0
        self._prefixes: dict[str, Partial] = {}  # of what runs, or ran when the engine died
        self._llm: Any = None

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._check_head_size()
        with _environment(self._config.threads):
            async with asyncio.timeout(START_SECONDS):
                self._llm = await asyncio.to_thread(self._build)
            await self._call("prepare_policy_worker")
        gc.collect()
        gc.freeze()  # or every full collection walks all that vLLM imported: 0.4 s, several times a minute

    def _check_head_size(self) -> None:
        """Refuse a head size that vLLM would accept here, and then die of at the first request."""
        from torch.cuda import is_available

        policy = json.loads((self._folder / "config.json").read_text())
        size = policy.get("head_dim") or policy["hidden_size"] // policy["num_attention_heads"]
        if not is_available() and size not in CPU_HEAD_SIZES:
            raise ConfigError(
                f"{self._folder}: vLLM's CPU attention has no kernel for heads of size {size}, only for "
                f"{', '.join(map(str, CPU_HEAD_SIZES))}; choose hidden_size / heads among them, or engine.kind = "
                "'transformers'"
            )

    def _build(self) -> Any:
        _fork_cores()
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**self._arguments()))

    def _arguments(self) -> dict[str, Any]:
        from torch.cuda import is_available

        gpu = is_available()
        config = self._config
        executor = "OwnedInlineExecutor" if config.tensor_parallel == 1 else "OwnedMultiprocExecutor"
        return {
            "model": str(self._folder),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "use_tqdm_on_load": False,
            "seed": secrets.randbits(31),  # replicas, and an engine and its successor, must not draw the same numbers
            "dtype": self._dtype,
            "logprobs_mode": "processed_logprobs",
            "max_num_seqs": config.slots,
            "max_logprobs": 1,
            "kv_cache_memory_bytes": config.kv_cache_bytes or (None if gpu else CPU_KV_CACHE_BYTES),
            "enforce_eager": not (gpu if self._compile is None else self._compile),
            "enable_prefix_caching": config.prefix_caching,
            "enable_chunked_prefill": False if self._seeded and not gpu else None,
            "block_size": None if gpu else CPU_BLOCK_TOKENS,
            "tensor_parallel_size": config.tensor_parallel,
            "generation_config": "vllm",  # a policy's own top_p or top_k must not reach the sampler
            "disable_log_stats": True,
            "worker_extension_cls": f"{WORKER}.PolicyWorker",
            "distributed_executor_backend": f"{WORKER}.{executor}",
            "additional_config": {"rollflow_owner": os.getpid()},
        }

    async def generate(self, request: GenerationRequest) -> Generation:
        prefix = request.prefix
        params = self._params(request)
        self._prefixes[request.id] = prefix
        try:
            return _generation(request.id, prefix, await self._run(request.prompt + prefix.tokens, params, request.id))
        finally:
            if self._llm is not None and not self._llm.errored:
                del self._prefixes[request.id]

    def _params(self, request: GenerationRequest) -> Any:
        given = len(request.prefix)
        alike = (request.max_new_tokens - given, request.temperature, self._stop_ids)
        if not self._seeded or request.seed is None:
            return _sampling(*alike)
        # What goes on here from another engine's tokens must not draw the numbers that these were drawn with.
        return _sampling.__wrapped__(*alike, seed=(request.seed + given) % 2**63)

    async def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...] | None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._suspended:
            return tuple((await self._call("prompt_logprobs_while_paused", list(tokens)))[0])
        params = SamplingParams(
            max_tokens=1, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._probes += 1
        output = await self._run(tokens, params, f"probe-{self._probes}")
        rows = output.prompt_logprobs[1:]
        return tuple(row[token].logprob for row, token in zip(rows, tokens[1:], strict=True))

    async def _run(self, prompt: Sequence[int], params: Any, id: str) -> Any:
        tokens = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": str(self._version)}
        self.check()
        with self._alive():
            async for output in self._llm.generate(tokens, params, id):
                final = output
        return final

    async def abort(self, ids: Sequence[str]) -> None:
        self.check()
        await self._answer(self._llm.abort(list(ids)))

    async def suspend(self, in_flight: InFlight) -> None:
        self.check()
        mode = "keep" if in_flight == "continue" else "abort"
        # Not `pause_generation`: it adds a sleep of 20 ms, a price paid with an idle engine at every version.
        await self._answer(self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=True))
        self._suspended = True

    async def fetch(self, version: int, weights: Path) -> None:
        pass  # they are here

    async def update(self, version: int, weights: Path) -> None:
        await self._call("load_policy", str(weights), self._repair_tied_head, seconds=UPDATE_SECONDS)
        await self._answer(self._llm.update_weight_version(str(version)))
        self._version = version

    async def resume(self) -> None:
        self.check()
        await self._answer(self._llm.resume_generation())
        self._suspended = False

    def check(self) -> None:
        if self._llm is None:
            raise EngineFailed("the vLLM engine is closed or was never started")
        if self._llm.errored:
            raise EngineFailed("vLLM's engine process died")

    def progress(self, have: Mapping[str, int]) -> dict[str, Partial]:
        # Read where vLLM gathers them: having every step's outputs handed over would wake a task per request and step.
        if self._llm is None:
            return {}
        gathered = self._llm.output_processor
        found: dict[str, Partial] = {}
        for id, since in have.items():
            for internal in gathered.external_req_ids.get(id, ()):
                prefix = self._prefixes[id]
                new = _said(gathered.request_states[internal], max(0, since - len(prefix)))
                found[id] = Partial.joined([prefix.after(since), new]) if len(prefix) > since else new
        return found

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.output_processor.propagate_error(llm.dead_error)  # or what still waits would wait for ever
            await asyncio.to_thread(llm.shutdown)
            llm.shutdown = lambda: None  # its __del__ calls it again, and fails loudly at the interpreter's end
            gc.unfreeze()

    async def _call(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> list[Any]:
        """Call a method of the workers; returns what each of them answers."""
        self.check()
        results: list[Any] = await self._answer(self._llm.collective_rpc(method, args=arguments), seconds)
        return results

    async def _answer(self, call: Awaitable[Any], seconds: float = CALL_SECONDS) -> Any:
        """Wait for an answer of vLLM's process. If it dies, vLLM would wait for ever, so the process is watched
        meanwhile.
        """
        asked = asyncio.ensure_future(call)
        try:
            with self._alive():
                async with asyncio.timeout(seconds):
                    while not (await asyncio.wait([asked], timeout=DEATH_SECONDS))[0]:
                        self.check()
                return asked.result()
        except TimeoutError as error:
            raise EngineFailed(f"vLLM's engine process did not answer within {seconds:.0f} s") from error
        finally:
            asked.cancel()

    @contextmanager
    def _alive(self) -> Iterator[None]:
        """Turn the engine's death into `EngineFailed`."""
        from vllm.exceptions import VLLMClientError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        try:
            yield
        except (EngineDeadError, EngineGenerateError) as error:
            raise EngineFailed(f"vLLM's engine process died: {error}") from error
        except VLLMClientError as error:
            raise ValueError(str(error)) from None  # a type that its receiver can read without vLLM


def _fork_cores() -> None:
    """On a CPU: let vLLM fork its core from a process that has imported vLLM, instead of a new interpreter.

    Imports are most of an engine's start on a CPU. The first time they run on another core, beside the imports of this
    process. When an engine starts again in this process, they are done. With a GPU, vLLM must spawn.
    """
    from torch.cuda import is_available

    if is_available():
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(CORE_IMPORTS)
    multiprocessing.forkserver.ensure_running()
    from vllm.v1.engine import utils

    utils.get_mp_context = lambda: context


@functools.lru_cache(maxsize=256)
def _sampling(max_new_tokens: int, temperature: float, stop_ids: tuple[int, ...], seed: int | None = None) -> Any:
    """Sampling parameters. Equal requests share them: making and copying them is a third of a request's cost."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        max_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        logprobs=0,
        flat_logprobs=True,
        stop_token_ids=list(stop_ids),
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def _said(state: Any, since: int) -> Partial:
    """The tokens of a running request, from `since` on, read from vLLM's own record."""
    tokens = tuple(state.detokenizer.output_token_ids[since:])
    end = since + len(tokens)
    starts = [(int(version), max(start, since)) for version, start in state.weight_version_starts]
    ends = [*(start for _, start in starts[1:]), end]
    # Not strict: before the first token there is an end, and no start.
    versions = [version for (version, start), stop in zip(starts, ends, strict=False) for _ in range(start, stop)]
    return Partial(tokens, tuple(state.logprobs_processor.logprobs.logprobs[since:end]), tuple(versions))


def _generation(id: str, prefix: Partial, output: Any) -> Generation:
    """vLLM's final RequestOutput as a Generation; its spans (version, start, end) become a version per token."""
    answer = output.outputs[0]
    tokens = tuple(answer.token_ids)
    versions: list[int] = []
    for span in answer.weight_versions or ():
        versions += [int(span.version)] * (span.end - span.start)
    logprobs = tuple(answer.logprobs.logprobs) if tokens else ()
    if not len(tokens) == len(logprobs) == len(versions):
        raise EngineFailed(f"{id}: {len(tokens)} tokens, {len(logprobs)} log-probs and {len(versions)} versions")
    whole = Partial.joined([prefix, Partial(tokens, logprobs, tuple(versions))])
    ending, cached = ENDINGS[answer.finish_reason], output.num_cached_tokens or 0
    return Generation(id, whole.tokens, whole.logprobs, whole.versions, ending, cached)


@contextmanager
def _environment(threads: int) -> Iterator[None]:
    """What vLLM and its processes read from the environment while they start; put back afterwards."""
    from torch.cuda import is_available

    before = dict(os.environ)
    os.environ |= {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # as vLLM decides by itself inside a Ray actor
    }
    if not is_available():
        os.environ |= {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a pinned thread starves whenever the learner shares its core
            "OMP_NUM_THREADS": str(threads),
        }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
