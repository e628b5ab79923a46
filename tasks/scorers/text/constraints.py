"""Checks whether a response follows the constraints of the IFEval benchmark (Zhou et al. 2023, arXiv 2311.07911). The
constraints have the names of the published data set.

Each check gets a non-empty response and the arguments of the data row, and returns whether the response follows the
constraint. The checks of capital and small letters do not detect the language of the response, because langdetect skips
words in capitals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollflow.tasks.scorers.text.language import detect_language, list_languages

Check = Callable[..., bool]
RELATIONS = ("less than", "at least")
WORD = re.compile(r"\w+(?:['\N{RIGHT SINGLE QUOTATION MARK}-]\w+)*")
SENTENCE_END = re.compile(r"[.!?\N{HORIZONTAL ELLIPSIS}]+[\"'\N{RIGHT DOUBLE QUOTATION MARK})\]*]*(?=\s|$)")
ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|Sr|Jr|St|vs|etc|Inc|Ltd|Co|approx|Fig)|\b(?:e\.g|i\.e|a\.m|p\.m)|\b[A-Z]|(?:^|\n)\s*\d+)\.$"
)
ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


def count_words(text: str) -> int:
    """Count the words of a text; a word with an apostrophe or a hyphen counts once."""
    return len(WORD.findall(text))


def count_sentences(text: str) -> int:
    """Count the sentences of a text. The period of "Dr." or of a list number does not end a sentence."""
    count, begin = 0, 0
    for found in SENTENCE_END.finditer(text):
        sentence = text[begin : found.end()]
        if ABBREVIATION.search(sentence.rstrip("\"')]*")) and text[found.end() :].strip():
            continue
        count += bool(WORD.search(sentence))
        begin = found.end()
    return count + bool(WORD.search(text[begin:]))


def _compare(count: int, relation: str, number: int) -> bool:
    if relation not in RELATIONS:
        raise ValueError(f"the relation {relation!r} must be one of {RELATIONS}")
    return count < number if relation == "less than" else count >= number


def _has_keywords(text: str, keywords: list[str]) -> bool:
    _check_list(keywords)
    return all(word.lower() in text.lower() for word in keywords)


def _has_keyword_often(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return _compare(len(re.findall(re.escape(keyword), text, re.IGNORECASE)), relation, frequency)


def _check_list(words: object) -> None:
    """Raise `TypeError` unless `words` is a non-empty list or tuple, because a text would be read as a list of its
    letters.
    """
    if not isinstance(words, list | tuple) or not words:
        raise TypeError(f"the value must be a list of words, not {words!r}")


def _lacks_words(text: str, forbidden_words: list[str]) -> bool:
    _check_list(forbidden_words)
    return not any(re.search(rf"\b{re.escape(word)}\b", text, re.IGNORECASE) for word in forbidden_words)


def _has_letter_often(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return _compare(text.lower().count(letter.lower()), let_relation, let_frequency)


def _has_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return _compare(count_sentences(text), relation, num_sentences)


def _has_words(text: str, num_words: int, relation: str) -> bool:
    return _compare(count_words(text), relation, num_words)


def _has_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return whether a text has `num_paragraphs` paragraphs that are separated by `***`. Only the first and the last
    paragraph may be empty.
    """
    paragraphs = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(paragraphs[1:-1]) and len([part for part in paragraphs if part]) == num_paragraphs


def _has_first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    paragraphs = [part.strip() for part in re.split(r"\n\n+", text) if part.strip()]
    if len(paragraphs) != num_paragraphs or not 1 <= nth_paragraph <= num_paragraphs:
        return False
    found = re.match(r"[\"'*]*([\w'-]+)", paragraphs[nth_paragraph - 1])
    return found is not None and found[1].rstrip("'").lower() == first_word.lower()


def _has_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[.*?\]", text)) >= num_placeholders


def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.lower().replace(" ", "").rstrip(".")
    pattern = r"\.\s?".join(map(re.escape, marker.split("."))) if "." in marker else re.escape(postscript_marker)
    return re.search(rf"^.*\b{pattern}", text, re.IGNORECASE | re.MULTILINE) is not None


def _has_bullets(text: str, num_bullets: int) -> bool:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-)[^\n]*\S", text, re.MULTILINE)) == num_bullets


def _is_constrained(text: str) -> bool:
    return any(answer in text for answer in ANSWERS)


def _has_highlights(text: str, num_highlights: int) -> bool:
    bold = re.findall(r"\*\*([^\n*]*)\*\*", text)
    plain = re.findall(r"(?<!\*)\*(?!\*)([^\n*]*)\*(?!\*)", text)
    return len([part for part in bold + plain if part.strip()]) >= num_highlights


def _has_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter)}\s?\d+", text)) >= num_sections


def _is_json(text: str) -> bool:
    text = re.sub(r"^```(?:json)?\s*|\s*```$", "", text.strip(), flags=re.IGNORECASE)
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _has_title(text: str) -> bool:
    return any(title.strip(" <>") for title in re.findall(r"<<([^\n]+?)>>", text))


def _has_two_responses(text: str) -> bool:
    responses = [part.strip() for part in text.split("******")]
    kept = [part for part in responses if part]
    return all(responses[1:-1]) and len(kept) == 2 and kept[0] != kept[1]


def _repeats_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def _ends_with(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def _has_capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return _compare(sum(word.isupper() for word in WORD.findall(text)), capital_relation, capital_frequency)


def _is_in_language(text: str, language: str) -> bool:
    """Return whether a text is in the language with this code. A text without letters has no language and follows the
    constraint, as in the published checker.

    Raises:
        Unjudged: the package langdetect is not installed.
    """
    if language not in (known := list_languages()):
        raise ValueError(f"no language has the code {language!r}; the codes are {', '.join(known)}")
    return detect_language(text) in (None, language)


# constraint -> its check, and the names of the check's keyword arguments
CHECKS: Mapping[str, tuple[Check, tuple[str, ...]]] = {
    "keywords:existence": (_has_keywords, ("keywords",)),
    "keywords:frequency": (_has_keyword_often, ("keyword", "frequency", "relation")),
    "keywords:forbidden_words": (_lacks_words, ("forbidden_words",)),
    "keywords:letter_frequency": (_has_letter_often, ("letter", "let_frequency", "let_relation")),
    "length_constraints:number_sentences": (_has_sentences, ("num_sentences", "relation")),
    "length_constraints:number_paragraphs": (_has_paragraphs, ("num_paragraphs",)),
    "length_constraints:number_words": (_has_words, ("num_words", "relation")),
    "length_constraints:nth_paragraph_first_word": (
        _has_first_word,
        ("num_paragraphs", "nth_paragraph", "first_word"),
    ),
    "detectable_content:number_placeholders": (_has_placeholders, ("num_placeholders",)),
    "detectable_content:postscript": (_has_postscript, ("postscript_marker",)),
    "detectable_format:number_bullet_lists": (_has_bullets, ("num_bullets",)),
    "detectable_format:constrained_response": (_is_constrained, ()),
    "detectable_format:number_highlighted_sections": (_has_highlights, ("num_highlights",)),
    "detectable_format:multiple_sections": (_has_sections, ("section_spliter", "num_sections")),
    "detectable_format:json_format": (_is_json, ()),
    "detectable_format:title": (_has_title, ()),
    "combination:two_responses": (_has_two_responses, ()),
    "combination:repeat_prompt": (_repeats_prompt, ("prompt_to_repeat",)),
    "startend:end_checker": (_ends_with, ("end_phrase",)),
    "startend:quotation": (_is_quoted, ()),
    "change_case:capital_word_frequency": (_has_capital_words, ("capital_frequency", "capital_relation")),
    "change_case:english_capital": (str.isupper, ()),
    "change_case:english_lowercase": (str.islower, ()),
    "language:response_language": (_is_in_language, ("language",)),
    "punctuation:no_comma": (lambda text: "," not in text, ()),
}


def check_constraint(name: str, text: str, arguments: Mapping[str, Any]) -> bool:
    """Return whether a response follows a constraint; an empty response follows none.

    Raises:
        ValueError: no check has this name, or an argument of the constraint is missing or wrong.
        Unjudged: the package that the check needs is not installed.
    """
    if name not in CHECKS:
        raise ValueError(f"no constraint has the name {name!r}; correct the column instruction_id_list")
    check, names = CHECKS[name]
    given = {key: arguments[key] for key in names if arguments.get(key) is not None}
    if missing := [key for key in names if key not in given]:
        raise ValueError(
            f"the constraint {name!r} needs the argument {missing[0]!r}, which the row's column kwargs does not give"
        )
    try:
        return bool(text.strip()) and check(text, **given)
    except (TypeError, AttributeError) as error:
        raise ValueError(f"the row's column kwargs gives the constraint {name!r} a wrong value ({error})") from None
