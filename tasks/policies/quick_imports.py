"""Quicker imports of transformers and of what is built on it: most of the start of a learner or an engine on a CPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import faster.

    Imported modules stay, so it is lost time to look for garbage in them. Only the losses and decoding of other models
    need scikit-learn and SciPy; accelerate is for those that are spread over devices (peft imports it itself).
    """
    gc.disable()
    try:
        import transformers.utils

        for library in ("sklearn", "scipy", "accelerate"):
            setattr(transformers.utils, f"is_{library}_available", lambda: False)
        yield
    finally:
        gc.enable()
