r"""Finds the answer that a response marks with the last `\boxed{...}`, with the last <answer> tag, or with "####"."""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
LINE = re.compile(r"####[ \t]*([^\n]*)")
SPACE = r"(?:[\s$]|\\q?quad\b|\\[,;: !()\[\]])*+"  # a possessive pattern, so that long white space takes linear time
WORD = r"(?:and|or|\\text\{\s*(?:and|or)\s*\})"
JOINT = re.compile(rf"{SPACE}\.?{SPACE}(?:[,;]{SPACE}{WORD}?|{WORD},?){SPACE}|{SPACE}")  # between boxes of one answer


def find_marked(response: str) -> str | None:
    """Return the marked answer of a response, or None if the response marks no answer.

    Several adjacent LaTeX boxes are one answer, with commas between their contents.
    """
    if (boxed := find_boxed(response)) is not None:
        return boxed
    if tags := TAG.findall(response):
        return str(tags[-1]).strip()
    lines = LINE.findall(response)
    return str(lines[-1]).strip() if lines else None


def find_boxed(text: str) -> str | None:
    """Return the content of the last LaTeX box, or of several adjacent ones, or None if the text has no closed box."""
    boxes = list_boxes(text) if BOX.search(text) else []
    return ", ".join(dict.fromkeys(_last_boxes(text, boxes))) if boxes else None


def list_boxes(text: str) -> list[tuple[int, int, str]]:
    """Return start, end and content of each outermost LaTeX box (boxed{...}) whose braces are closed, in order."""
    boxes, position = list[tuple[int, int, str]](), 0
    while found := BOX.search(text, position):
        end = _closing_brace(text, found.end())
        if end is None:
            position = found.end()
            continue
        boxes.append((found.start(), end + 1, strip_boxes(text[found.end() : end])))
        position = end + 1
    return boxes


def strip_boxes(text: str) -> str:
    """Replace each LaTeX box (boxed{...}) in a text by the box's content."""
    for start, end, content in reversed(list_boxes(text) if BOX.search(text) else []):
        text = text[:start] + content + text[end:]
    return text.strip()


def _last_boxes(text: str, boxes: list[tuple[int, int, str]]) -> list[str]:
    """Return the content of the last LaTeX box, and of earlier boxes that are joined to it by a separator such as
    "and".
    """
    first = len(boxes) - 1
    while first and JOINT.fullmatch(text, boxes[first - 1][1], boxes[first][0]):
        first -= 1
    return [content for _, _, content in boxes[first:]]


def _closing_brace(text: str, position: int) -> int | None:
    depth = 1
    for place in range(position, len(text)):
        letter = text[place]
        if letter in "{}" and text[place - 1] != "\\":
            depth += 1 if letter == "{" else -1
            if not depth:
                return place
    return None
