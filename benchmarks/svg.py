"""Writes small SVG pictures by hand: the same calls give the same bytes on every machine.

A picture brings its own background and follows the reader's light or dark setting, so it is legible on any page. Each
colour has a name, with one value for a light page and one for a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

SMALL, NORMAL, LARGE = 13, 14, 16  # font sizes in px; a picture 880 px wide is shown 838 px wide on GitHub
FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
# Name -> value on a light page, value on a dark page.
PALETTE = {
    "page": ("#ffffff", "#0d1117"),
    "edge": ("#d0d7de", "#3d444d"),
    "ink": ("#1f2328", "#e6edf3"),
    "soft": ("#59636e", "#a0a8b1"),
    "grey": ("#f6f8fa", "#1a2028"),
    "blue": ("#0969da", "#58a6ff"),
    "blue-fill": ("#ddf4ff", "#0f2a48"),
    "green": ("#1a7f37", "#3fb950"),
    "green-fill": ("#dafbe1", "#12331c"),
    "amber": ("#9a6700", "#d29922"),
    "amber-fill": ("#fff8c5", "#33290c"),
}


class Picture:
    """A picture of `width` x `height` px with a title, and a text that says the same in words."""

    def __init__(self, width: int, height: int, title: str, text: str) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title text" font-family="{FONT}">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="text">{escape(text)}</desc>',
            f"<style>\n{_style()}</style>",
        ]
        for name in ("soft", "blue", "green", "amber"):
            self._parts.append(
                f'<marker id="{name}-tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
                f'orient="auto-start-reverse"><path class="fill-{name}" d="M0 0 8 4 0 8z"/></marker>'
            )
        self.box(0.5, 0.5, width - 1, height - 1, fill="page", line="edge", radius=10)

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, line: str = "", radius: float = 6
    ) -> None:
        """Draw a rectangle with round corners."""
        line = f" line-{line}" if line else ""
        self._parts.append(
            f'<rect class="fill-{fill}{line}" x="{_number(x)}" y="{_number(y)}" width="{_number(width)}" '
            f'height="{_number(height)}" rx="{_number(radius)}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        size: int = NORMAL,
        ink: str = "ink",
        at: str = "start",
        bold: bool = False,
    ) -> None:
        """Write one line of text; `at` is the side of the text on which `x` lies: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text class="fill-{ink}" x="{_number(x)}" y="{_number(y)}" font-size="{size}" text-anchor="{at}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(
        self, points: Sequence[tuple[float, float]], *, line: str, width: float = 1.5, dash: str = "", tip: bool = False
    ) -> None:
        """Draw a line through the points, with an arrow tip at its end if `tip`."""
        more = (f' stroke-dasharray="{dash}"' if dash else "") + (f' marker-end="url(#{line}-tip)"' if tip else "")
        self._parts.append(
            f'<path class="line-{line}" fill="none" stroke-width="{_number(width)}" stroke-linejoin="round"{more} '
            f'd="{_path(points)}"/>'
        )

    def area(self, points: Sequence[tuple[float, float]], *, fill: str, opacity: float = 1.0) -> None:
        """Fill the polygon of the points."""
        self._parts.append(f'<path class="fill-{fill}" fill-opacity="{_number(opacity)}" d="{_path(points)}z"/>')

    def dot(self, x: float, y: float, *, fill: str, radius: float = 3.5) -> None:
        """Draw a filled circle."""
        self._parts.append(f'<circle class="fill-{fill}" cx="{_number(x)}" cy="{_number(y)}" r="{_number(radius)}"/>')

    def to_svg(self) -> str:
        """Return the picture as the text of an SVG file."""
        return "\n".join([*self._parts, "</svg>\n"])


def _style() -> str:
    dark = "".join(_rules(name, values[1]) for name, values in PALETTE.items())
    light = "".join(_rules(name, values[0]) for name, values in PALETTE.items())
    return f"{light}@media (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _rules(name: str, value: str) -> str:
    return f".fill-{name} {{ fill: {value} }} .line-{name} {{ stroke: {value} }}\n"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "M" + " ".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: float) -> str:
    """Return the number with one decimal, without trailing zeros."""
    return f"{value:.1f}".removesuffix(".0")
