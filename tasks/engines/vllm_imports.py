"""Imports vLLM's core in the process from which, on a CPU, vLLM's core processes are forked.

A missing module only slows the start.
"""

from __future__ import annotations

from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.runtime.gc_tuning import pause_collector

with pause_collector():
    disable_optional_libraries()
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import rollflow.tasks.engines.vllm_worker  # noqa: F401
