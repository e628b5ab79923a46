"""Detects the language of a text with the package langdetect, which IFEval's published checker uses.

Equal texts always have the same result, because the random generator of langdetect starts with `SEED` for each text,
and its languages are loaded in sorted order.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from rollflow.tasks.scorers.base import Unjudged

SEED = 0
MISSING = "the package langdetect is missing; pip install 'rollflow[languages]'"


def detect_language(text: str) -> str | None:
    """Return the code of a text's language, such as "de" or "zh-cn", "unknown" if no language is likely, or None for a
    text without letters.

    Raises:
        Unjudged: the package langdetect is not installed.
    """
    factory = _load_factory()
    from langdetect import LangDetectException

    detector = factory.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


def list_languages() -> list[str]:
    """Return the codes of the languages that `detect_language` knows; raise `Unjudged` if langdetect is missing."""
    return list(_load_factory().get_lang_list())


def load_detector() -> None:
    """Load the detector, if langdetect is installed, so that the first response does not wait for it."""
    try:
        _load_factory()
    except Unjudged:
        return  # the check of data rows reports a missing package


@functools.cache
def _load_factory() -> Any:
    """Load langdetect's language profiles, which takes a second of CPU time and 40 MB of memory."""
    try:
        from langdetect import PROFILES_DIRECTORY, DetectorFactory
    except ImportError:
        raise Unjudged(MISSING) from None
    factory = DetectorFactory()
    factory.set_seed(SEED)
    files = sorted(file for file in Path(PROFILES_DIRECTORY).iterdir() if not file.name.startswith((".", "_")))
    factory.load_json_profile([file.read_text("utf-8") for file in files])
    return factory
