r"""The verifier `maths`, which compares the final answer of a response with the reference answer by math-verify.

    response --> the marked answer (\boxed{}, <answer>, ####), else the last expression --> LaTeX --> sympy
    reference["answer"], LaTeX or plain ------------------------------------------------> LaTeX --> sympy

Answers with equal values are equal, for example `1/2`, `\frac{1}{2}`, `0.5` and `50\%`, or `x(x+1)` and `x^2+x`. Units
are not compared.

A response whose answer cannot be compared within `reward.deadline_seconds`, such as `10^{10^{10}}`, gets the outcome
"timeout".

A response without an answer, or with a too long answer, is unparsable.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from sympy import Basic, MatrixBase, Set, Tuple
from sympy.core.relational import Relational

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.text.marked import BOX, find_boxed, find_marked
from rollflow.tasks.scorers.text.maths_text import (
    WRAPPED,
    clean_answer,
    drop_unit,
    normalise_prose,
    read_base,
    read_words,
)

LONGEST = 1000  # largest number of characters of an answer
MOST_DIGITS = 500  # largest number of digits of a number in an answer
DEEPEST = 24  # deepest nesting of brackets in an answer
LONGEST_BARE = 200  # largest number of characters of a response that consists of the answer alone
TAIL = 1000  # number of characters at the end of a response in which an unmarked answer is searched
LONGEST_SHOWN = 60  # largest number of characters of an answer in a score's reason
PRECISION = 15  # number of significant digits to which numbers are computed for comparison
DIGITS = re.compile(r"\d+")
# signs of prose: a word at the start with more text after it, a verb, two long words, or a colon after a word
PROSE = re.compile(
    r"^\W*(?!(?:sin|cos|tan|log|ln|exp|sqrt|pi)\b)[A-Za-z]{2,}\s+\S|\b(?:is|are|was|so|the|we|then|thus|hence)\b|"
    r"\b(?!square|cubic|sq)[A-Za-z]{3,}\s+(?:\S+\s+)*[A-Za-z]{3,}|[A-Za-z]\s*:",
    re.IGNORECASE,
)
PERCENT = re.compile(r"\s*(?:\\?%|percent(?:age)?|pct)$", re.IGNORECASE)
COMMAND = re.compile(r"\\(?:begin|end)\s*\{\w+\}|\\[A-Za-z]+")
LATEX = (LatexExtractionConfig(boxed_match_priority=-1),)
ANY = (LatexExtractionConfig(), ExprExtractionConfig())

logging.getLogger("math_verify").setLevel(logging.ERROR)  # suppresses math-verify's warning that its timers are off


def maths(response: str, reference: Mapping[str, Any], *, marked: bool = False, decimals: int = 6) -> Score:
    """Compare the final answer of a response with `reference["answer"]`.

    With `marked`, only a marked answer counts, for example in a LaTeX box. Decimal numbers are rounded to `decimals`
    digits after the decimal point. Numbers that would be rounded to 0 are compared to `decimals` significant digits.
    """
    gold = str(reference["answer"])
    answer = find_marked(response)
    if answer is None and (marked or BOX.search(response)):
        return _unparsable("no marked answer" if marked else "the box is not closed")
    if answer is None and is_bare(response, gold):
        answer = response.strip()
    if answer is None:
        return _compare_prose(response, gold, decimals)
    if not answer.strip(" $\\"):
        return _unparsable("the answer is empty")
    if fault := find_fault(answer):
        return _unparsable(f"the answer {fault}")
    return _judge(equals(gold, answer, decimals), answer, gold)


def equals(gold: str, answer: str, decimals: int = 6) -> bool:
    """Return whether an answer, without a mark such as a LaTeX box, equals the reference answer.

    If the reference is a whole solution with a LaTeX box, only the content of the box counts.
    """
    gold, answer = clean_answer(find_boxed(gold) or gold), clean_answer(answer)
    if (words := read_words(gold)) is not None:
        return words in (read_words(answer), read_words(rf"\text{{{answer}}}"))
    bases = read_base(gold), read_base(answer)
    if None not in bases and bases[0] != bases[1]:
        return False
    gold, answer = drop_unit(gold), drop_unit(answer)
    if _verify(read_latex(gold), read_latex(answer), decimals):
        return True
    one, other = PERCENT.sub("", gold), PERCENT.sub("", answer)
    is_mixed = (one == gold) != (other == answer)  # "12.5%" for 12.5
    return is_mixed and _verify(read_latex(one), read_latex(other), decimals)


def find_fault(answer: str) -> str | None:
    """Return why an answer is too long or too complex to compare, or None."""
    if len(answer) > LONGEST:
        return f"has {len(answer):,} characters, and {LONGEST:,} is the limit"
    if (digits := max(map(len, DIGITS.findall(answer)), default=0)) > MOST_DIGITS:
        return f"has a number of {digits:,} digits, and {MOST_DIGITS} is the limit"
    depth = deepest = 0
    for letter in answer:
        depth += (letter in "{([") - (letter in "})]")
        deepest = max(deepest, depth)
    return f"is nested {deepest} levels deep, and {DEEPEST} is the limit" if deepest > DEEPEST else None


def is_bare(response: str, gold: str) -> bool:
    """Return whether a whole response is an answer, such as `x + 1`, and not a sentence that contains an answer."""
    if len(response) > LONGEST_BARE or "\n" in response.strip():
        return False
    return not PROSE.search(COMMAND.sub("", WRAPPED.sub("", response))) or (
        read_words(clean_answer(gold)) is not None and read_words(clean_answer(response)) is not None
    )


@lru_cache(maxsize=1024)
def read_latex(text: str) -> tuple[Any, ...]:
    """Parse an answer into a tuple of the sympy expression, if there is one, and the text."""
    return tuple(parse(f"${text}$", LATEX, parsing_timeout=None))


def _compare_prose(response: str, gold: str, decimals: int) -> Score:
    """Compare the reference answer with the last expression that math-verify finds in a response without a marked
    answer.
    """
    found = parse(normalise_prose(response[-TAIL:]), ANY, parsing_timeout=None)
    if not found:
        return _unparsable("no answer found")
    answer = str(found[-1])
    if fault := find_fault(answer):
        return _unparsable(f"the answer {fault}")
    return _judge(equals(gold, answer, decimals), answer, gold)


def _verify(gold: tuple[Any, ...], answer: tuple[Any, ...], decimals: int) -> bool:
    are_equal = verify(
        list(gold),
        list(answer),
        float_rounding=decimals,
        numeric_precision=PRECISION,
        allow_set_relation_comp=True,
        timeout_seconds=None,
    )
    return are_equal and _has_tiny_numbers(gold, answer, decimals)


def _has_tiny_numbers(gold: tuple[Any, ...], answer: tuple[Any, ...], decimals: int) -> bool:
    """Compare numbers that round to 0, because math-verify treats all such numbers as equal. Return whether `answer`
    contains each such number of `gold`, equal in `decimals` significant digits.
    """
    limit = 10.0**-decimals
    tiny = [number for part in gold for number in _list_numbers(part) if 0 < abs(number) < limit]
    if not tiny or gold[-1] == answer[-1]:  # the last element is the text
        return True
    found = [number for part in answer for number in _list_numbers(part)]
    return all(any(abs(one - number) <= limit * abs(number) for one in found) for number in tiny)


def _list_numbers(part: Any) -> Iterator[Any]:
    """Yield the value of a number, or the values of the numbers in a set, a tuple, a matrix or an equation."""
    if isinstance(part, Basic) and part.is_number:
        value = part.doit().evalf(PRECISION)
        if value.is_comparable:
            yield value
    elif isinstance(part, Set | Tuple | Relational | MatrixBase):
        for inner in part.flat() if isinstance(part, MatrixBase) else part.args:
            yield from _list_numbers(inner)


def _judge(right: bool, answer: str, gold: str) -> Score:
    reason = f"{_shorten(answer)} {'equals' if right else 'differs from'} {_shorten(gold)}"
    return Score(float(right), reason, Outcome.CORRECT if right else Outcome.WRONG)


def _unparsable(reason: str) -> Score:
    return Score(0.0, reason, Outcome.UNPARSABLE)


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
