"""Prevents transformers from importing libraries that a run does not need, which shortens the start of a process.

Transformers needs scikit-learn and SciPy only for losses and decoding that a run does not use, and accelerate only for
models that are spread over devices.
"""

from __future__ import annotations

OPTIONAL = ("sklearn", "scipy", "accelerate")


def disable_optional_libraries() -> None:
    """Make transformers treat the libraries in `OPTIONAL` as not installed, until this process ends.

    A module of transformers that was imported without such a library would fail if it found the library later.
    """
    import transformers.utils

    for library in OPTIONAL:
        setattr(transformers.utils, f"is_{library}_available", lambda: False)
