"""What the process has imported that ranks are forked from: most of a rank's start, done once for all of them."""

from __future__ import annotations

from rollflow.tasks.policies.quick_imports import quick_imports

with quick_imports():
    import transformers.models.auto.modeling_auto  # noqa: F401

    import rollflow.tasks.learners.rank_process  # noqa: F401
