"""Defines three example question sources, which recipes name by import path: short programs, lists of words, and
products that need a tool.

    source        a question                                         a right response
    LinePrograms  plus 12, times 3.                                  x=int(input());x+=12;x*=3;print(x)
    WordLists     Write 3 words, with owl, in capitals, last fox.    HEN, OWL, FOX
    LongProducts  4821*7093                                          34195353

The scorer of `LinePrograms` is `code` with `fenced = false`: a program is right if it prints the right numbers. The
scorer of `WordLists` is `instructions`: a list is right if it follows all constraints. The scorer of `LongProducts` is
`exact`, and its demonstrations call the tool `python` of the environment `tools`.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rollflow.tasks.prompts.base import DemonstratedTurn, Question, QuestionSource

TRIES = 1000  # largest number of questions to draw for a position until one is not held out
STEPS = {"plus": "+", "minus": "-", "times": "*"}  # word for a program's step -> operator
INPUTS, CASES = range(2, 100), 1  # inputs of the programs, and number of test cases per question
WORDS = ("ant", "bee", "cat", "cow", "dog", "elk", "fox", "hen", "owl", "pig", "ram", "yak")


class _DrawnSource(QuestionSource):
    """A question source that draws questions at random. A question depends only on the seed, the stream (training,
    demonstrations or held-out) and the position.

    A question with a held-out key is neither trained on nor demonstrated.
    """

    def __init__(self, *, seed: int, held_out: int) -> None:
        self._seed = seed
        self._held: dict[str, Question] = {}
        for position in range(held_out * 20):
            if len(self._held) == held_out:
                break
            question = self._draw(random.Random(f"{seed}:held out:{position}"))
            self._held.setdefault(question.key, question)

    def training(self, position: int) -> Question:
        """Return the training question at `position`."""
        return self._find_allowed("training", position)

    def demonstration(self, position: int) -> Question:
        """Return the question to demonstrate at `position`."""
        return self._find_allowed("demonstration", position)

    def held_out(self, count: int) -> list[Question]:
        """Return the first `count` held-out questions."""
        return list(self._held.values())[:count]

    def _find_allowed(self, stream: str, position: int) -> Question:
        draw = random.Random(f"{self._seed}:{stream}:{position}")
        questions = (self._draw(draw) for _ in range(TRIES))
        return next(question for question in questions if question.key not in self._held)

    def _draw(self, draw: random.Random) -> Question:
        raise NotImplementedError


class LinePrograms(_DrawnSource):
    """Questions that ask for a one-line program that changes a number step by step. The steps are the key."""

    def __init__(self, *, seed: int, held_out: int, most: int = 3) -> None:
        """Ask for 2 to `most` steps."""
        self._most = most
        super().__init__(seed=seed, held_out=held_out)

    def _draw(self, draw: random.Random) -> Question:
        verbs = draw.choices(list(STEPS), k=draw.randint(2, self._most))
        steps = [(verb, draw.randint(2, 9 if verb == "times" else 99)) for verb in verbs]
        lines = [f"x{STEPS[verb]}={number}" for verb, number in steps]
        program = ";".join(["x=int(input())", *lines, "print(x)"])
        cases = [
            {"stdin": f"{value}\n", "stdout": f"{_compute(steps, value)}\n"} for value in draw.sample(INPUTS, CASES)
        ]
        text = f"{', '.join(f'{verb} {number}' for verb, number in steps)}."
        return Question(text, program, {"answer": program, "cases": cases}, text)


def _compute(steps: Sequence[tuple[str, int]], value: int) -> int:
    """Apply the steps of a program to an input, and return the result."""
    for verb, number in steps:
        value = {"plus": value + number, "minus": value - number, "times": value * number}[verb]
    return value


class WordLists(_DrawnSource):
    """Questions that ask for a list of words under constraints, in the format of the IFEval benchmark; the constraints
    are the key.
    """

    def __init__(self, *, seed: int, held_out: int, most: int = 5) -> None:
        """Ask for 2 to `most` words."""
        self._most = most
        super().__init__(seed=seed, held_out=held_out)

    def _draw(self, draw: random.Random) -> Question:
        count = draw.randint(2, self._most)
        chosen = [draw.choice(WORDS) for _ in range(count)]
        asked = [f"Write {count} words"]
        constraints: list[tuple[str, Mapping[str, Any]]] = [
            ("length_constraints:number_words", {"num_words": count, "relation": "at least"}),
            ("length_constraints:number_words", {"num_words": count + 1, "relation": "less than"}),
        ]
        kept, last = chosen[draw.randrange(count - 1)], chosen[-1]
        upper, joint = draw.choice((True, False)), draw.choice((" ", ", "))
        asked.append(f"with {kept}")
        constraints.append(("keywords:existence", {"keywords": [kept]}))
        asked.append("in capitals" if upper else "in small letters")
        constraints.append((f"change_case:english_{'capital' if upper else 'lowercase'}", {}))
        if joint == " ":
            asked.append("without commas")
            constraints.append(("punctuation:no_comma", {}))
        asked.append(f"last {last}")
        constraints.append(("startend:end_checker", {"end_phrase": last}))
        answer = joint.join(chosen)
        columns = {
            "instruction_id_list": [name for name, _ in constraints],
            "kwargs": [given for _, given in constraints],
        }
        text = f"{', '.join(asked)}."
        return Question(text, answer.upper() if upper else answer, {"answer": answer, **columns}, text)


class LongProducts(_DrawnSource):
    """Questions that ask for the product of two numbers. The key is the two numbers in ascending order.

    All products have the same number of digits, because a policy of only two layers copies a tool's result by
    position.
    """

    def __init__(self, *, seed: int, held_out: int, digits: int = 4) -> None:
        """Ask for products of two numbers with `digits` digits each; only products with twice as many digits are
        used.
        """
        self._range = math.isqrt(10 ** (2 * digits - 1)) + 1, 10**digits - 1
        super().__init__(seed=seed, held_out=held_out)

    def _draw(self, draw: random.Random) -> Question:
        one, other = draw.randint(*self._range), draw.randint(*self._range)
        text, answer = f"{one}*{other}", str(one * other)
        call = json.dumps({"name": "python", "arguments": {"code": text}})
        result = {"role": "tool", "content": f"{answer}\n"}
        first = DemonstratedTurn(f"<tool_call>{call}</tool_call>", (result,), ends=True)
        key = "*".join(map(str, sorted((one, other))))
        return Question(text, answer, {"answer": answer}, key, turns=(first, DemonstratedTurn(answer, ends=True)))
