"""The modules that the ranks need, imported only once, by the process from which ranks are forked."""

from __future__ import annotations

from rollflow.tasks.policies.quick_imports import quick_imports

with quick_imports():
    import transformers.models.auto.modeling_auto  # noqa: F401

    import rollflow.tasks.learners.multi_rank.rank_process  # noqa: F401
