"""A few SVG shapes, escaped, and an estimate of the width of text."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

FONT = "system-ui, 'Segoe UI', Helvetica, Arial, sans-serif"
# The widest of the fonts above takes 0.6 em per character on average.
CHARACTER_EM = 0.58

INK, FAINT, RULE, PAPER = "#1b2430", "#5b6675", "#d5dae1", "#ffffff"

Colour = tuple[int, int, int]
Scale = tuple[Colour, Colour]
BLUE: Scale = ((214, 230, 250), (22, 78, 160))
ORANGE: Scale = ((253, 228, 204), (190, 76, 12))


def shade(scale: Scale, fraction: float) -> str:
    """Return the colour at a fraction of the scale."""
    low, high = scale
    mixed = (round(a + (b - a) * fraction) for a, b in zip(low, high, strict=True))
    return "#" + "".join(f"{part:02x}" for part in mixed)


def escape_xml(text: str) -> str:
    """Return text escaped for XML, without control characters."""
    return escape("".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text))


def text_width(text: str, size: float) -> float:
    """Return the estimated width of text, in pixels."""
    return len(text) * size * CHARACTER_EM


def longest_fitting(variants: Sequence[str], width: float, size: float) -> str:
    """Return the first variant that fits, of variants in order of length, longest first; "" if none does."""
    return next((text for text in variants if text_width(text, size) <= width), "")


class Canvas:
    """Shapes in drawing order, and their extent."""

    def __init__(self) -> None:
        self._shapes: list[str] = []
        self._right = self._bottom = 0.0

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", edge: str = ""
    ) -> None:
        """Draw a rectangle; `title` is its tooltip."""
        stroke = f' stroke="{edge}"' if edge else ""
        inside = f"<title>{escape_xml(title)}</title>" if title else ""
        self._shapes.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{fill}"{stroke}>'
            f"{inside}</rect>"
        )
        self._extend(x + width, y + height)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 12,
        fill: str = INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """Draw one line of text with its baseline at `y`."""
        weight = ' font-weight="600"' if bold else ""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}" text-anchor="{anchor}"'
            f' pointer-events="none"{weight}>{escape_xml(text)}</text>'
        )
        if anchor == "start":
            self._extend(x + text_width(text, size), y + size * 0.3)

    def line(self, x1: float, y1: float, x2: float, y2: float, stroke: str = RULE, width: float = 1) -> None:
        """Draw a line."""
        self._shapes.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"'
            f' stroke-width="{width:g}"/>'
        )
        self._extend(max(x1, x2), max(y1, y2))

    def to_svg(self, title: str, margin: float) -> str:
        """Return the document, as large as the shapes and a margin."""
        width, height = self._right + margin, self._bottom + margin
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}"'
            f' viewBox="0 0 {width:.0f} {height:.0f}" font-family="{FONT}" role="img">'
            f"<title>{escape_xml(title)}</title>"
            f'<rect width="100%" height="100%" fill="{PAPER}"/>' + "".join(self._shapes) + "</svg>\n"
        )

    def _extend(self, right: float, bottom: float) -> None:
        self._right, self._bottom = max(self._right, right), max(self._bottom, bottom)
