"""Imports vLLM's core in the process from which vLLM's core processes are forked on a CPU.

If a module is missing here, engines work, but start more slowly.
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

    import rollflow.tasks.engines.vllm.worker  # noqa: F401
