"""Prevents transformers from importing libraries that a run does not need, which shortens the start of a process.

Transformers needs scikit-learn and SciPy only for losses and decoding methods that a run does not use, and accelerate
only for models on several devices.
"""

from __future__ import annotations

OPTIONAL = ("sklearn", "scipy", "accelerate")


def disable_optional_libraries() -> None:
    """Make transformers treat the libraries in `OPTIONAL` as not installed for the rest of this process.

    The libraries in `OPTIONAL` stay disabled: a transformers module that was imported without a library fails if it
    finds the library later.
    """
    import transformers.utils

    for library in OPTIONAL:
        setattr(transformers.utils, f"is_{library}_available", lambda: False)
