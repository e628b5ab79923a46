"""Imports the modules that the ranks need, once, in the process from which all ranks are forked."""

from __future__ import annotations

from rollflow.tasks.policies.optional_libraries import disable_optional_libraries
from rollflow.tasks.runtime.gc_tuning import pause_collector

with pause_collector():
    disable_optional_libraries()
    import transformers.models.auto.modeling_auto  # noqa: F401

    import rollflow.tasks.learners.multi_rank.rank_process  # noqa: F401
