"""Runs inside vLLM's own processes, to end them in time, to load weights and to compute log-probs.

- **No orphans**: if the process that created the engine dies, vLLM's processes end within about `POLL_SECONDS`.
- **No stale head**: after each load of weights, the output head is computed again, because vLLM on a CPU does not
  refresh its copy of a *tied* head.
- **No compilation at the first batch**: the rank of the sampled token, which rollflow does not use, is not computed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Any

import psutil
import torch
import vllm.v1.sample.sampler as sampler
from vllm import SamplingParams, envs
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rollflow.tasks.runtime.fork_server import be_named

POLL_SECONDS = 0.5
OWNER = "rollflow_owner"  # key in vLLM's `additional_config` for the process id of the process that created the engine
PROBE = "rollflow-probe"  # id of a request that computes log-probabilities while vLLM is paused


def end_with_owner(owner: int) -> None:
    """Start a thread that kills this process and its children once the process `owner` has died."""

    def watch() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(owner)
            while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(POLL_SECONDS)
        for child in psutil.Process().children(recursive=True):
            child.kill()
        os._exit(1)  # `sys.exit` could wait for the dead owner during its cleanup

    threading.Thread(target=watch, name="owner-watchdog", daemon=True).start()


def begin_core(owner: int) -> None:
    """Set the name of vLLM's EngineCore process, and end this process once the process `owner` has died."""
    be_named(f"{envs.VLLM_PROCESS_NAME_PREFIX}::EngineCore")
    end_with_owner(owner)


class OwnedInlineExecutor(UniProcExecutor):  # type: ignore[misc]
    """vLLM executor for one device, which runs inside the EngineCore process and ends when its owner dies."""

    def _init_executor(self) -> None:
        begin_core(self.vllm_config.additional_config[OWNER])
        super()._init_executor()


class OwnedMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc]
    """vLLM executor for several devices, with one worker process each. vLLM ends the workers with EngineCore."""

    def _init_executor(self) -> None:
        begin_core(self.vllm_config.additional_config[OWNER])
        super()._init_executor()


class PolicyWorker:
    """Methods that are added to vLLM's worker class (`worker_extension_cls`), and that an engine calls by
    `collective_rpc`."""

    vllm_config: Any
    model_runner: Any
    reload_weights: Any
    execute_model: Any
    sample_tokens: Any

    def prepare_policy_worker(self) -> None:
        """Disable the computation of the sampled token's rank, and prepare speculative decoding if it is configured.

        The engine calls `prepare_policy_worker` once, after its start.
        """
        sampler.batched_count_greater_than = _skip_ranks
        if getattr(self.model_runner, "speculative_config", None) is not None:
            from rollflow.tasks.engines.vllm.drafts import prepare_speculation

            prepare_speculation(self.model_runner)

    def remember(self, prompts: list[bytes], responses: list[bytes]) -> None:
        """Keep past responses to prompts, oldest first, from which speculative decoding drafts tokens."""
        for prompt, response in zip(prompts, responses, strict=True):
            self.model_runner.drafter.past.add(prompt, response)

    def load_policy(self, folder: str, repair_tied_head: bool) -> None:
        """Load the weights in `folder` into vLLM's model, and compute everything again that is derived from weights."""
        self.model_runner.vllm_config.load_config.load_format = "safetensors"  # it was "dummy" until now
        self.reload_weights(weights_path=folder)
        if repair_tied_head:
            _repack_head(self.model_runner.get_model())

    def prompt_logprobs_while_paused(self, tokens: list[int]) -> list[float]:
        """Compute the log-probs of tokens[1:] without vLLM's paused scheduler, to verify weights that were just
        loaded.

        The caches of the paused vLLM must be empty, because the computation uses the first blocks of the KV cache.
        """
        size = self.vllm_config.cache_config.block_size
        blocks = list(range(1, 2 + len(tokens) // size))  # block 0 is vLLM's null block
        most = self.vllm_config.scheduler_config.max_num_batched_tokens
        for start in range(0, len(tokens), most):
            step = SchedulerOutput.make_empty()
            if start == 0:
                groups = len(self.model_runner.kv_cache_config.kv_cache_groups)
                step.scheduled_new_reqs = [_build_probe(tokens, (blocks,) * groups)]
            else:
                step.scheduled_cached_reqs = CachedRequestData([PROBE], set(), [], {}, [None], [start], [0])
            step.total_num_scheduled_tokens = min(most, len(tokens) - start)
            step.num_scheduled_tokens = {PROBE: step.total_num_scheduled_tokens}
            self.execute_model(step)
            output = self.sample_tokens(None)
        done = SchedulerOutput.make_empty()
        done.finished_req_ids = {PROBE}
        self.execute_model(done)
        logprobs: list[float] = output.prompt_logprobs_dict[PROBE].logprobs[:, 0].tolist()
        return logprobs


def _build_probe(tokens: list[int], block_ids: tuple[list[int], ...]) -> Any:
    return NewRequestData(
        req_id=PROBE,
        prompt_token_ids=tokens,
        mm_features=[],
        sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=0),
        pooling_params=None,
        block_ids=block_ids,
        num_computed_tokens=0,
        lora_request=None,
        prefill_token_ids=tokens,
    )


def _repack_head(model: torch.nn.Module) -> None:
    head = getattr(model, "lm_head", None)
    method = getattr(head, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(head)


def _skip_ranks(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.zeros(logprobs.shape[0], dtype=torch.long, device=logprobs.device)
