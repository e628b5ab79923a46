"""Computes the keys of questions; questions with the same key count as the same question.

For example, the key of a sum ignores the order of its numbers, and the normalised text ignores upper and lower case.
"""

from __future__ import annotations

import re
import unicodedata

WORDS = re.compile(r"\w+|[^\w\s]")


def normalise_text(text: str) -> str:
    """Return a text in Unicode form NFKC and lower case, with single spaces and without punctuation at its ends.

    A text that consists only of punctuation stays unchanged.
    """
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    first, last = 0, len(words)
    while first < last and _is_outer(words[first]):
        first += 1
    while last > first and _is_outer(words[last - 1]):
        last -= 1
    return words[first:last] or words


def _is_outer(letter: str) -> bool:
    """Return True for spaces, full stops and quotation marks, and False for letters, digits, brackets and dashes."""
    return letter == " " or unicodedata.category(letter) in ("Po", "Pi", "Pf")


def split_words(text: str) -> list[str]:
    """List the words, numbers and signs of the normalised text, in order."""
    return WORDS.findall(normalise_text(text))


def unordered_key(text: str, answer: str) -> str:
    """Return a key of a question and its answer that ignores the order of words within each line.

    `3 + 5 + 1` and `1 + 3 + 5` are the same question, but `5 - 3` and `3 - 5` have different answers and are two
    questions. The key depends on the order of lines, because lines may be the rows of a grid.
    """
    lines = [" ".join(sorted(split_words(line))) for line in text.splitlines()]
    return "\n".join([*lines, normalise_text(answer)])
