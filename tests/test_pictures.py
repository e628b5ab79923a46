"""Tests of the README's pictures: they are current, legible on light and dark pages, and described in words."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import findfont
from PIL import ImageFont

from benchmarks import pictures
from benchmarks.svg import PALETTE
from tests.support.recorded import unpack

ROOT = Path(__file__).parents[1]
FIGURES, DATA = ROOT / "docs/figures", ROOT / "docs/figures/quick_start.jsonl"
NAMES = (pictures.ARCHITECTURE, pictures.CURVES)
SHOWN = 838  # width in px at which GitHub shows a picture of a README
SVG = "{http://www.w3.org/2000/svg}"

each_picture = pytest.mark.parametrize("name", NAMES)


@dataclass(frozen=True)
class Box:
    """A rectangle in a picture: the box of a text with its words, or a drawn rectangle without words."""

    words: str
    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom

    def holds(self, other: Box) -> bool:
        across = self.left <= other.left and other.right <= self.right
        return across and self.top <= other.top and other.bottom <= self.bottom

    @property
    def middle(self) -> Box:
        x, y = (self.left + self.right) / 2, (self.top + self.bottom) / 2
        return Box(self.words, x, y, x, y)


@cache
def font(weight: str, size: float) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(findfont(f"DejaVu Sans:{weight}"), size)


def texts(picture: ElementTree.Element) -> Iterator[Box]:
    """Yield the box of each text, in the wide font DejaVu Sans."""
    for text in picture.iter(f"{SVG}text"):
        size, x, y = (float(text.attrib[name]) for name in ("font-size", "x", "y"))
        weight = "bold" if "font-weight" in text.attrib else "normal"
        words = text.text or ""
        width = font(weight, size).getlength(words)
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.attrib["text-anchor"]] * width
        yield Box(words, left, y - 0.75 * size, left + width, y + 0.2 * size)


def rectangles(picture: ElementTree.Element) -> Iterator[Box]:
    """Yield the drawn rectangles; the first is the picture's background."""
    for one in picture.iter(f"{SVG}rect"):
        x, y, width, height = (float(one.attrib[name]) for name in ("x", "y", "width", "height"))
        yield Box("", x, y, x + width, y + height)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours by WCAG 2.1, from 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_committed_pictures_of_the_docs_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pictures", "--folder", str(tmp_path), "--data", str(DATA)])
    pictures.main()
    for name in NAMES:
        assert (tmp_path / name).read_bytes() == (FIGURES / name).read_bytes(), "run `python -m benchmarks.pictures`"


@each_picture
def test_picture_text_has_at_least_12_px(name: str) -> None:
    picture = ElementTree.parse(FIGURES / name).getroot()
    sizes = [float(text.attrib["font-size"]) for text in picture.iter(f"{SVG}text")]
    assert min(sizes) * SHOWN / float(picture.attrib["width"]) >= 12


@each_picture
def test_picture_texts_do_not_overlap(name: str) -> None:
    pairs = combinations(texts(ElementTree.parse(FIGURES / name).getroot()), 2)
    assert [(one.words, other.words) for one, other in pairs if one.overlaps(other)] == []


@each_picture
def test_picture_texts_stay_in_their_boxes(name: str) -> None:
    picture = ElementTree.parse(FIGURES / name).getroot()
    drawn = list(rectangles(picture))
    around = {text: [box for box in drawn if box.holds(text.middle)] for text in texts(picture)}
    assert [text.words for text, boxes in around.items() if not boxes or not boxes[-1].holds(text)] == []


@each_picture
def test_picture_has_title_and_description(name: str) -> None:
    picture = ElementTree.parse(FIGURES / name).getroot()
    parts = {part.attrib["id"]: part.text for part in picture if "id" in part.attrib and part.tag != f"{SVG}marker"}
    assert picture.attrib["aria-labelledby"].split() == list(parts)
    assert all(parts.values())


def test_readme_pictures_have_alt_texts() -> None:
    images = re.findall(r"!\[([^\]]*)\]\((docs/figures/[^)]+)\)", (ROOT / "README.md").read_text())
    assert [path for _, path in images] == [f"docs/figures/{name}" for name in NAMES]
    assert all(len(words) > 20 for words, _ in images)


@pytest.mark.parametrize("page", [0, 1], ids=["light", "dark"])
def test_text_contrasts_with_its_background(page: int) -> None:
    inks = {
        "ink": ("page", "grey", "blue-fill", "green-fill", "amber-fill"),
        "soft": ("page", "grey"),
        **dict.fromkeys(("blue", "green", "amber"), ("page",)),
    }
    pairs = [(ink, ground) for ink, grounds in inks.items() for ground in grounds]
    assert [pair for pair in pairs if contrast(*(PALETTE[colour][page] for colour in pair)) < 4.5] == []


def test_readme_states_the_numbers_of_its_data() -> None:
    first = pictures.load_runs(DATA)[0]
    ages = [sum(column) for column in zip(*first.staleness, strict=True)]
    said = " ".join(f"{age} {100 * count / sum(ages):.0f}%" for age, count in enumerate(ages))
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert f"seed={first.seed}" in readme
    assert f"{first.accuracy[0][1]:.1%} → {first.accuracy[-1][1]:.1%}" in readme
    assert said in readme


def test_read_run_returns_the_stored_curves(tmp_path: Path) -> None:
    found = pictures.read_run(str(unpack("whole", tmp_path)), "a1b2c3d")
    assert (found.run, found.commit, len(found.weights)) == ("whole", "a1b2c3d", 64)
    assert found.accuracy[0][0] == 0
    assert len(found.reward) == len(found.staleness) == 3
    assert len({sum(counts) for counts in found.staleness}) == 1  # each version trains on equally many trajectories
