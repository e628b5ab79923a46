"""Disables libraries that transformers imports without need: imports take most of a learner's or an engine's start.

transformers needs scikit-learn and SciPy only for other models' losses and decoding, and accelerate only for models
that are spread over devices. (peft imports accelerate itself.)
"""

from __future__ import annotations

OPTIONAL = ("sklearn", "scipy", "accelerate")


def disable_optional_libraries() -> None:
    """Make transformers believe, for the life of this process, that three libraries are not installed.

    The libraries stay disabled: a module of transformers that was imported without a library would fail if it found the
    library later.
    """
    import transformers.utils

    for library in OPTIONAL:
        setattr(transformers.utils, f"is_{library}_available", lambda: False)
