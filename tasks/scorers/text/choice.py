r"""The verifier `choice`, which scores responses to multiple-choice questions.

The verifier searches these parts of a response in this order: a marked answer such as `\boxed{B}`, a phrase such as
"Answer: B", the whole response or its last line, a letter in parentheses. The first part that contains a choice
decides. If this part names several letters, the response is unparsable.

The column `answer` of a data row is the letter or the text of the right option. The optional column `options` of a data
row has the texts of A, B, C and so on, as a list or as an object.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import Any

from rollflow.storage.records import Outcome
from rollflow.tasks.scorers.base import Score
from rollflow.tasks.scorers.text.marked import find_marked

LETTERS = ascii_uppercase[:10]  # letters that may be chosen if the data row has no column "options"
WRAP = re.compile(r"\\(?:text|textbf|mathrm|mathbf|textit|operatorname)\s*\{([^{}]*)\}")
LIST = r"[\s*\"'$]*\(?([A-Za-z])\)?(?P<more>(?:\s*(?:,|/|&|\bor\b|\band\b)\s*(?:option\s*)?\(?[A-Z]\)?(?![\w']))*)"
PHRASE = re.compile(
    r"\b(?:answer|choice)\b(?:\s+(?:is|would\s+be|must\s+be|should\s+be)\b\s*:?|\s*[:=]|\*\*\s*:|:\*\*)"
    r"[\s*]*(?:option\b|choice\b|letter\b)?" + LIST + r"(?![\w'])(?![ \t]+(?!because|since|as|and|or|is|with)[a-z])",
    re.IGNORECASE,
)
PARENTHESES = re.compile(r"(?<![\w(])\(([A-Za-z])\)(?!\w)")
ALONE = re.compile(r"\(?([A-Za-z])(?:[).:,]|$)\)?\s*(.*)", re.DOTALL)


def choose(response: str, reference: Mapping[str, Any]) -> Score:
    """Compare the letter that a response chooses with the letter of the right option."""
    options = read_options(reference)
    gold = find_gold(reference)
    found = find_letters(response, options)
    if not found:
        return Score(0.0, "no choice found", Outcome.UNPARSABLE)
    if len(found) > 1:
        return Score(0.0, f"several choices: {', '.join(sorted(found))}", Outcome.UNPARSABLE)
    (letter,) = found
    return Score(float(letter == gold), f"{letter} chosen, {gold} is right")


def read_options(reference: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of a data row's options, by letter. Without the column "options", each text is empty.

    Raises:
        ValueError: the column "options" is neither a list of texts nor an object.
    """
    options = reference.get("options")
    if options is None:
        return dict.fromkeys(LETTERS, "")
    if isinstance(options, Mapping):
        named = {str(letter).strip().upper(): str(text) for letter, text in options.items()}
    elif isinstance(options, Sequence) and not isinstance(options, str):
        named = dict(zip(ascii_uppercase, map(str, options), strict=False))
    else:
        raise ValueError('the column "options" must be a list of texts, or an object with a text for each letter')
    if not named or len(named) < len(options) or not named.keys() <= set(ascii_uppercase):
        raise ValueError('the column "options" must have 1 to 26 options, each with one letter')
    return named


def find_gold(reference: Mapping[str, Any]) -> str:
    """Return the letter of the right option; raise `ValueError` if the column "answer" is neither a letter nor the text
    of an option.
    """
    options, answer = read_options(reference), str(reference["answer"])
    found = _read_choice(answer, options)
    if len(found) != 1:
        raise ValueError(
            f"the answer {answer!r} must be one of the letters {', '.join(options)} or the text of one option"
        )
    [letter] = found
    if (said := _clean(answer).strip("()").upper()) in options and said != letter:
        raise ValueError(f"the answer {answer!r} is ambiguous: it is a letter, and also the text of option {letter}")
    return letter


def find_letters(response: str, options: Mapping[str, str]) -> set[str]:
    """Return the letters of the options that a response chooses; several letters mean that the response does not
    decide.
    """
    if (marked := find_marked(response)) is not None:
        return _read_choice(marked, options) or _in_parentheses(marked, options)
    phrases = set[str]()
    for found in PHRASE.finditer(response):
        letters = {found[1], *re.findall(r"\b[A-Z]\b", found["more"])}
        if found[1].isupper() or found["more"]:
            phrases |= {letter.upper() for letter in letters} & options.keys()
    if phrases:
        return phrases
    lines = response.strip().splitlines()
    for text in (response, *lines[-1:]):
        if chosen := _read_choice(text, options):
            return chosen
    return _in_parentheses(response, options)


def _read_choice(text: str, options: Mapping[str, str]) -> set[str]:
    """Return the letters that a text chooses if the whole text is a choice: a letter, several letters, or the text of
    an option.
    """
    text = _clean(text)
    said = _plain(text)
    if said and (equal := {letter for letter, option in options.items() if _plain(option) == said}):
        return equal
    parts = [part.strip(" ()") for part in re.split(r"\s*(?:,|/|&|;|\bor\b|\band\b)\s*", text) if part.strip(" ()")]
    if parts and all(len(part) == 1 and part.upper() in options for part in parts):
        return {part.upper() for part in parts}
    found = ALONE.fullmatch(text)
    if not found or found[1].upper() not in options:
        return set()
    letter, rest = found[1].upper(), _plain(found[2])
    if not rest or rest == _plain(options[letter]) or (not any(options.values()) and len(rest) <= 200):
        return {letter} | (_in_parentheses(found[2], options) if rest else set())
    return set()


def _in_parentheses(text: str, options: Mapping[str, str]) -> set[str]:
    return {letter.upper() for letter in PARENTHESES.findall(text) if letter.upper() in options}


def _clean(text: str) -> str:
    text = " ".join(WRAP.sub(r"\1", text).replace("$", "").split()).strip("*_`\"' ")
    return re.sub(r"^(?:option|choice|answer)\s*:?\s+(?=\(?[A-Za-z]\b)", "", text, flags=re.IGNORECASE).strip()


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(" .")
