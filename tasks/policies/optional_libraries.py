"""Prevents transformers from importing libraries that a run does not need, so that processes start faster.

Scikit-learn and SciPy are used only for losses and decoding methods that a run does not need, and accelerate only for
models on several devices.
"""

from __future__ import annotations

OPTIONAL = ("sklearn", "scipy", "accelerate")


def disable_optional_libraries() -> None:
    """Make transformers treat the libraries in `OPTIONAL` as not installed in this process.

    The libraries in `OPTIONAL` stay disabled, because a module that was imported without a library fails if it finds
    the library later.
    """
    import transformers.utils

    for library in OPTIONAL:
        setattr(transformers.utils, f"is_{library}_available", lambda: False)
