"""What makes two questions the same, and which questions a run holds out.

Each question has a canonical key: all orders of a sum's numbers have one key, and so have all spellings of a question.
A question is held out if its key, or its normalised text, is that of a question that some source of the run holds out.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import Literal

Split = Literal["text", "key"]  # of a run that was recorded before there were keys; of any other

ENDS = re.compile(r"^[\W_]+|[\W_]+$")
WORDS = re.compile(r"\w+|[^\w\s]")


def normalised(text: str) -> str:
    """`text` in NFKC and lower case, with single spaces, without punctuation and symbols at its ends.

    A text of nothing else keeps them.
    """
    words = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return ENDS.sub("", words) or words


def words_of(text: str) -> list[str]:
    """The words, numbers and signs of a text, normalised, in order."""
    return WORDS.findall(normalised(text))


def unordered_key(text: str, answer: str) -> str:
    """The same for all orders of a question's words, numbers and signs that have one answer.

    So `3 + 5 + 1` and `1 + 3 + 5` are one question, `5 - 3` and `3 - 5` two.
    """
    return "\n".join([" ".join(sorted(words_of(text))), normalised(answer)])


class HeldOut:
    """The keys of the questions that are held out. All sources of a run share one.

    A run that was recorded before there were keys has one for each source, with the texts as they are (`exact`).
    """

    def __init__(self, *, exact: bool = False) -> None:
        self._exact = exact
        self._keys: set[str] = set()

    def add(self, text: str, key: str) -> None:
        """Hold a question out."""
        self._keys.update(self._of(text, key))

    def holds(self, text: str, key: str) -> bool:
        """True if the question is held out, in whatever form."""
        return not self._keys.isdisjoint(self._of(text, key))

    def _of(self, text: str, key: str) -> Iterable[str]:
        return (text,) if self._exact else (key, normalised(text))

    def __len__(self) -> int:
        return len(self._keys)
