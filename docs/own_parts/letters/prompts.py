"""A prompt source whose questions ask how often a letter occurs in a word."""

from __future__ import annotations

import random

from rollflow.tasks.prompts.base import Question, QuestionSource


class LetterCounts(QuestionSource):
    """Questions about random words of letters from `alphabet`. The seed, the stream and the position of a question
    determine the question.
    """

    def __init__(self, *, seed: int, held_out: int, alphabet: str = "abc", length: int = 6) -> None:
        self._seed, self._alphabet, self._length = seed, alphabet, length
        drawn = (self._drawn("held out", position) for position in range(20 * held_out))
        distinct = list({question.text: question for question in drawn}.values())
        self._held = {question.text: question for question in distinct[:held_out]}

    def training(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside("training", position)

    def demonstration(self, position: int) -> Question:
        """See `QuestionSource`."""
        return self._outside("demonstration", position)

    def held_out(self, count: int) -> list[Question]:
        """See `QuestionSource`."""
        return list(self._held.values())[:count]

    def _outside(self, stream: str, position: int) -> Question:
        """Return the first question of a position that is not held out. A position has several candidates."""
        tries = (self._drawn(stream, position, attempt) for attempt in range(1000))
        return next(question for question in tries if question.text not in self._held)

    def _drawn(self, *place: object) -> Question:
        draw = random.Random(f"{self._seed}:{place}")
        letter, word = draw.choice(self._alphabet), "".join(draw.choices(self._alphabet, k=self._length))
        answer = str(word.count(letter))
        return Question(f"How many {letter} in {word}? ", answer, {"answer": answer})
