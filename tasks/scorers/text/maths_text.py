r"""Rewrites mathematical answers as LaTeX that math-verify can parse, for example Unicode signs, `2**3`, `3 1/2` and
`1e-4`.
"""

from __future__ import annotations

import re
import unicodedata

PLAIN: dict[str, str | int | None] = {
    **dict.fromkeys("\N{MINUS SIGN}\N{EN DASH}\N{FIGURE DASH}\N{NON-BREAKING HYPHEN}\N{SMALL HYPHEN-MINUS}", "-"),
    **dict.fromkeys("\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}\N{IDEOGRAPHIC SPACE}\u200b\t\n\r", " "),
}
SIGNS: dict[str, str | int | None] = {
    **PLAIN,
    "×": r"\times ",
    "⋅": r"\cdot ",
    "·": r"\cdot ",
    "÷": "/",
    "∕": "/",
    "∞": r"\infty ",
    "π": r"\pi ",
    "∅": r"\emptyset ",
    "≤": r"\le ",
    "≥": r"\ge ",
    "≠": r"\ne ",
    "∪": r"\cup ",
    "∩": r"\cap ",
    "∈": r"\in ",
    "°": r"^\circ ",
    "≈": "",
    "\N{FULLWIDTH COMMA}": ",",
    "\N{FULLWIDTH PERCENT SIGN}": "%",
    "\N{FULLWIDTH EQUALS SIGN}": "=",
    "\N{FULLWIDTH LEFT PARENTHESIS}": "(",
    "\N{FULLWIDTH RIGHT PARENTHESIS}": ")",
}
TABLE = str.maketrans(SIGNS)
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+")
ROOT = re.compile(r"√\s*(\([^()]*\)|\{[^{}]*\}|[\w.]+)")
VULGAR = re.compile("[¼-¾⅐-⅞]")
MIXED = re.compile(r"(?<![\d.,/])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d|\.\d)")
POWER = re.compile(r"\*\*\s*(\([^()]*\)|-?[\w.]++(?:\^\{(?:[^{}]|\{[^{}]*\})*\})*+)(?!\s*\*\*)")
SCIENTIFIC = re.compile(r"(?<![\w.}])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])")
GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:\\[,!; ]|\{,\}|~| )\s*\d{3})+(?![\d.]*\d)")
ABOUT = re.compile(r"^(?:approximately|about|roughly|exactly|\\approx|\\sim|~)\s*", re.IGNORECASE)
WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
WORDS = re.compile(r"[A-Za-z][A-Za-z' .,-]*")
# A number with words after it, such as "42 apples" or "10 m/s".
MEASURED = re.compile(r"([^A-Za-z\\]*\d[^A-Za-z\\]*?)\s*([A-Za-z][A-Za-z. ]*(?:/\s*[A-Za-z]+)?(?:\^?\{?[23]\}?)?)")
NO_UNIT = re.compile(  # words that are not a unit, because they change the value of the number
    r"\b(?:and|or|to|by|over|plus|minus|times|divided|squared|cubed|half|halves|thirds?|quarters?|hundred|thousand|"
    r"[mb]illion|trillion|dozen|score|percent|pi|sqrt|mod|choose|base|root|factorial|more|less|than|not|if|where|"
    r"sin|cos|tan|log|ln|exp|infinity|inf)\b",
    re.IGNORECASE,
)
MATHS_WORD = re.compile(r"infinity|infty|sqrt|alpha|beta|gamma|delta|theta|lambda|sigma|omega", re.IGNORECASE)
BASE = re.compile(r"_\s*\{?\s*(\d+)\s*\}?$")


def normalise_prose(text: str) -> str:
    """Rewrite the digits, dashes, spaces and mixed numbers of a text in ASCII, without LaTeX."""
    return MIXED.sub(r"(\1+\2/\3)", _write_digits(text).translate(str.maketrans(PLAIN)))


def normalise(text: str) -> str:
    """Rewrite signs, digits and plain notation of an answer as LaTeX."""
    text = RAISED.sub(lambda found: f"^{{{found[0].translate(SUPERSCRIPTS)}}}", text)
    text = _write_digits(text)
    text = VULGAR.sub(_write_fraction, text).translate(TABLE)
    text = ROOT.sub(lambda found: rf"\sqrt{{{found[1].strip('(){}')}}}", text)
    text = MIXED.sub(r"\1\\frac{\2}{\3}", text)
    for _ in range(8):  # repeated, because powers such as "2**3**4" are rewritten from right to left
        text, count = POWER.subn(lambda found: f"^{{{found[1].strip('()')}}}", text)
        if not count:
            break
    text = SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    return GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text)


def clean_answer(text: str) -> str:
    """Return an answer as LaTeX, without dollar signs, Markdown marks, or a full stop at its end."""
    text = text.replace(r"\$", "").replace("$", "").replace(r"\left", "").replace(r"\right", "").strip()
    for opening, closing in ((r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`")):
        if text.startswith(opening) and text.endswith(closing):
            text = text[len(opening) : -len(closing)].strip()
    text = normalise(text.rstrip(".,;: ")).replace(r"\varnothing", r"\emptyset")
    return ABOUT.sub("", text.strip()).strip()


def drop_unit(text: str) -> str:
    """Return only the number of a text such as "42 apples" or "10 m/s"; return other texts unchanged."""
    found = MEASURED.fullmatch(WRAPPED.sub(r" \1 ", text).strip())
    if not found or NO_UNIT.search(found[2]):
        return text
    is_unit = re.search("[A-Za-z]{2}|/", found[2])
    return found[1].strip() if is_unit else text


def read_words(text: str) -> str | None:
    """Return an answer in words, such as "no solution", in normalised spelling, or None if the answer is not made of
    words.
    """
    plain = WRAPPED.sub(lambda found: found[1].strip("()"), text).strip()
    if not WORDS.fullmatch(plain) or MATHS_WORD.fullmatch(plain):
        return None
    letters = sum(letter.isalpha() for letter in plain)
    if letters < 4 and plain == text.strip() and plain.lower() not in ("yes", "no"):
        return None  # "xy" is a product
    return " ".join(plain.casefold().strip(" .,").split())


def read_base(text: str) -> str | None:
    """Return the base of a number that is written with its base, such as `12_5`, or None."""
    found = BASE.search(text.rstrip(" }"))
    return found[1] if found else None


def _write_digits(text: str) -> str:
    """Replace the digits of other scripts by ASCII digits."""
    return "".join(str(unicodedata.decimal(one)) if one.isdecimal() else one for one in text)


def _write_fraction(found: re.Match[str]) -> str:
    top, _, bottom = unicodedata.normalize("NFKC", found[0]).partition("\N{FRACTION SLASH}")
    return rf"\frac{{{top}}}{{{bottom}}}"
