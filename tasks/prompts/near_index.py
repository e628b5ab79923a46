"""Finds training questions that are near duplicates of held-out questions: questions that differ in few words.

The overlap of two questions is the share of the held-out question's `N`-word sequences (n-grams) that also occur in the
training question. Two questions are near duplicates if their overlap is at least `NEAR`, both over all n-grams and over
the n-grams that are rare among the held-out questions. Frequent n-grams belong to the wording that many questions
share. A question with fewer than `N` words has a single n-gram of all its words.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from rollflow.tasks.prompts.base import Question
from rollflow.tasks.prompts.keys import split_words

N = 3
NEAR = 0.8
TEMPLATE = 0.1  # an n-gram in more than this share of the held-out questions is frequent

Gram = tuple[str, ...]


class NearIndex:
    """Index of the held-out questions, which finds those that a given training question nearly duplicates."""

    def __init__(self, held: Sequence[Question]) -> None:
        """Map each rare n-gram to the held-out questions that contain the n-gram, and count the rare n-grams of each
        question.
        """
        index: dict[Gram, list[int]] = defaultdict(list)
        self._grams = [_list_grams(question) for question in held]
        for which, grams in enumerate(self._grams):
            for gram in grams:
                index[gram].append(which)
        most = max(1, TEMPLATE * len(held))
        self._index = {gram: having for gram, having in index.items() if len(having) <= most}
        self._sizes = Counter(which for having in self._index.values() for which in having)

    def find(self, question: Question) -> list[int]:
        """Return the indices of the held-out questions with which a training question overlaps by `NEAR` or more."""
        grams = _list_grams(question)
        shared = Counter(which for gram in grams for which in self._index.get(gram, ()))
        near = (which for which, count in shared.items() if count >= NEAR * self._sizes[which])
        return [which for which in near if len(grams & self._grams[which]) >= NEAR * len(self._grams[which])]


def _list_grams(question: Question) -> set[Gram]:
    words = split_words(question.text)
    return {tuple(words[start : start + N]) for start in range(max(1, len(words) - N + 1))}
