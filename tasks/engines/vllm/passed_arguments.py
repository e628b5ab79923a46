"""Decides which arguments of vLLM a recipe may pass on by the table `engine.vllm`.

- An argument is rejected if a key of rollflow sets it, or if it would break a guarantee of rollflow. All other
  arguments of the installed vLLM are passed on.
- This module does not import vLLM, so that a recipe is checked fast.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from rollflow.storage.errors import ConfigError

ARGUMENTS_FILE = "engine/arg_utils.py"  # the file of vLLM that defines the arguments
ARGUMENTS_CLASSES = ("EngineArgs", "AsyncEngineArgs")

# argument of vLLM -> the key to set instead
REPLACED: Mapping[str, str] = {
    "allow_deprecated_quantization": "engine.quantization",
    "attention_backend": "engine.attention_backend",
    "data_parallel_size": "engine.replicas",
    "disable_sliding_window": "engine.max_model_len",
    "dtype": "policy.dtype",
    "enable_prefix_caching": "engine.prefix_caching",
    "enforce_eager": "engine.enforce_eager",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "kv_cache_memory_bytes": "engine.kv_cache_bytes",
    "max_model_len": "engine.max_model_len",
    "max_num_queued_reqs": "engine.max_concurrent_requests",
    "max_num_queued_tokens": "engine.max_concurrent_requests",
    "max_num_seqs": "engine.max_concurrent_requests",
    "model": "policy.path",
    "num_gpu_blocks_override": "engine.kv_cache_bytes",
    "pipeline_parallel_size": "engine.tensor_parallel",
    "quantization": "engine.quantization",
    "quantization_config": "engine.quantization",
    "spec_method": "engine.speculation",
    "spec_model": "engine.speculation",
    "spec_tokens": "engine.draft_tokens",
    "speculative_config": "engine.speculation",
    "tensor_parallel_size": "engine.tensor_parallel",
}

# reason -> the arguments of vLLM that are rejected for this reason
REASONS: Mapping[str, str] = {
    "responses would not have the distribution that their recorded log-probs describe": """
        diffusion_config generation_config logits_processors logprobs_mode override_generation_config watermark_config
    """,
    "the same tokens would have different log-probs in two computations": """
        enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds mamba_config
    """,
    "an engine starts with random weights, and loads each policy version from the run's storage": """
        code_revision download_dir hf_token ignore_patterns load_format model_loader_extra_config model_weights
        pt_load_map_location revision safetensors_load_strategy use_tqdm_on_load weight_transfer_config
    """,
    "the engine must run the same model as the learner": """
        config_format convert hf_config_path hf_overrides mm_encoder_only model_class_overrides pooler_config runner
        trust_remote_code
    """,
    "vLLM gets and returns only tokens, and has no tokenizer": """
        enable_prompt_embeds io_processor_plugin reasoning_config reasoning_parser reasoning_parser_plugin
        skip_tokenizer_init structured_outputs_config tokenizer tokenizer_mode tokenizer_revision tokens_only
    """,
    "each engine draws its own seed, and the seeds of responses follow from the key seed": "seed",
    "rollflow collects vLLM's responses, log-probs and metrics itself": """
        aux_output_config disable_log_stats enable_log_requests enable_return_routed_experts max_logprobs
        per_request_spec_decode_metrics return_sampling_mask served_model_name stream_interval
    """,
    "rollflow starts, pauses, watches and ends vLLM's processes itself": """
        additional_config distributed_executor_backend enable_fault_tolerance fault_tolerance_config scheduler_cls
        shutdown_timeout worker_cls worker_extension_cls
    """,
    "an engine runs on the GPUs of one node that Ray gives to the engine": """
        data_parallel_address data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
        data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port data_parallel_size_local
        data_parallel_start_rank decode_context_parallel_size device_ids elastic_ep_max_dp_size enable_elastic_ep
        master_addr master_port nnodes node_rank prefill_context_parallel_size
    """,
    "a weight update would not find experts that vLLM has moved or copied": "enable_eplb eplb_config",
    "a weight update has not been tried with weights outside of the GPU": """
        cpu_offload_gb cpu_offload_params engram_config offload_backend offload_group_size offload_num_in_group
        offload_params offload_prefetch_step
    """,
    "a weight update clears only caches inside of the engine": """
        ec_transfer_config kv_offloading_backend kv_offloading_size kv_transfer_config
    """,
    "vLLM would listen on an address that other machines can reach": "kv_events_config",
    "the learner publishes weights that already contain its LoRA matrices": "default_mm_loras enable_lora",
    "the check of the KV cache before a run counts with the block size that rollflow sets": "block_size",
    "a seeded engine on a CPU must compute each prompt in one step": """
        enable_chunked_prefill long_prefill_token_threshold long_prefill_token_threshold_adaptive
        max_num_scheduled_tokens
    """,
    "vLLM would leave out values that the log-probs of the probe need": "kv_sharing_fast_prefill",
    "the log-probs of an engine with a quantized KV cache have not been compared with a learner's": """
        kv_cache_dtype kv_cache_dtype_skip_layers
    """,
}
REFUSED: Mapping[str, str] = {
    **{name: f"{reason}; remove the argument" for reason, names in REASONS.items() for name in names.split()},
    **{name: f"rollflow configures this by another key; set {key} instead" for name, key in REPLACED.items()},
}


def find_refusal(given: Mapping[str, object]) -> tuple[str, object, str] | None:
    """Return the key, the value and the reason of the first rejected argument in `engine.vllm`, or None."""
    for name, value in given.items():
        if name in REFUSED:
            return f"engine.vllm.{name}", value, REFUSED[name]
    return None


def check_names(given: Mapping[str, object], known: Iterable[str]) -> None:
    """Reject arguments that the installed vLLM does not have; `known` are the names of its arguments.

    Raises:
        ConfigError: an argument is unknown; the message names the known argument with the most similar name, or the key
            to set in place of that argument.
    """
    allowed = {name for name in known if not name.startswith("_")} - REFUSED.keys()
    for name, value in given.items():
        if name not in allowed:
            close = get_close_matches(name.replace("-", "_"), [*allowed, *REPLACED], n=1, cutoff=0.7)
            cure = f"did you mean {REPLACED.get(close[0], close[0])}?" if close else "remove it"
            raise ConfigError(f"engine.vllm.{name} = {value!r}: the installed vLLM has no such argument; {cure}")


def read_names() -> list[str]:
    """Read the names of all arguments from the source of the installed vLLM.

    Reading the source takes less than 0.1 seconds, and importing vLLM several seconds.
    """
    found = find_spec("vllm")
    assert found is not None, "vLLM is not installed"
    [folder, *_] = found.submodule_search_locations or [""]
    tree = ast.parse((Path(folder) / ARGUMENTS_FILE).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name in ARGUMENTS_CLASSES]
    fields = [field for node in classes for field in node.body if isinstance(field, ast.AnnAssign)]
    return [field.target.id for field in fields if isinstance(field.target, ast.Name)]
