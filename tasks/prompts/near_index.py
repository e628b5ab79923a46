"""Finds training questions that are near duplicates of held-out questions.

Two questions with different keys may differ in one word, so that one reveals the answer of the other. The overlap of
two questions is the share of the held-out question's `N`-word sequences (n-grams) that also occur in the training
question. Two questions with an overlap of `NEAR` or more are near duplicates. N-grams in more than a tenth of the
held-out questions are ignored, because many questions share this wording.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.keys import split_words

N = 3
NEAR = 0.8
TEMPLATE = 0.1

Gram = tuple[str, ...]


class NearIndex:
    """An index of the held-out questions, to find those that a training question nearly duplicates."""

    def __init__(self, held: Sequence[Question]) -> None:
        """Map each n-gram to the held-out questions that contain it, without frequent n-grams, and count the n-grams of
        each question.
        """
        index: dict[Gram, list[int]] = defaultdict(list)
        for which, question in enumerate(held):
            for gram in _list_grams(question):
                index[gram].append(which)
        most = max(1, TEMPLATE * len(held))
        self._index = {gram: having for gram, having in index.items() if len(having) <= most}
        self._sizes = Counter(which for having in self._index.values() for which in having)

    def find(self, question: Question) -> list[int]:
        """Return the numbers of the held-out questions with which a training question overlaps by `NEAR` or more."""
        shared = Counter(which for gram in _list_grams(question) for which in self._index.get(gram, ()))
        return [which for which, count in shared.items() if count >= NEAR * self._sizes[which]]


def _list_grams(question: Question) -> set[Gram]:
    words = split_words(question.text)
    return {tuple(words[start : start + N]) for start in range(max(1, len(words) - N + 1))}
