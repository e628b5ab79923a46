"""Faster imports of transformers and of packages built on it: most of a learner's or an engine's start on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import faster during the block.

    Imported modules stay, so searching them for garbage wastes time. scikit-learn and SciPy are needed only for losses
    and decoding of other models; accelerate only for models spread over devices (peft imports it itself).
    """
    gc.disable()
    try:
        import transformers.utils

        for library in ("sklearn", "scipy", "accelerate"):
            setattr(transformers.utils, f"is_{library}_available", lambda: False)
        yield
    finally:
        gc.enable()
