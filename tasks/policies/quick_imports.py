"""Faster imports of transformers and its dependents, which take most of a learner's or an engine's start on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Make imports in the block faster: without garbage collection, and without three libraries that are not needed.

    Imported modules stay in memory, so searching them for garbage wastes time. Transformers needs scikit-learn and
    SciPy only for other models' losses and decoding, and accelerate only for models that are spread over devices. (peft
    imports accelerate itself.)
    """
    gc.disable()
    try:
        import transformers.utils

        for library in ("sklearn", "scipy", "accelerate"):
            setattr(transformers.utils, f"is_{library}_available", lambda: False)
        yield
    finally:
        gc.enable()
