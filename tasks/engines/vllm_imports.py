"""The imports of the process from which vLLM's core is forked on a CPU. A missing import only slows the start."""

from __future__ import annotations

from rollflow.tasks.policies.quick_imports import quick_imports

with quick_imports():
    import vllm.model_executor.models.llama
    import vllm.model_executor.models.qwen2
    import vllm.v1.attention.backends.cpu_attn
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker  # noqa: F401

    import rollflow.tasks.engines.vllm_worker  # noqa: F401
