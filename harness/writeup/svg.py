"""Figures as SVG for a page: text as text, colours as variables, a value under every point.

matplotlib's SVG is wordy, and compresses to a tenth; :func:`packed` is what the page unpacks when a
figure comes into view.
"""

from __future__ import annotations

import base64
import colorsys
import gzip
import re
from functools import cache
from html import escape

from matplotlib.colors import to_hex, to_rgb

from harness.render.figure import save
from harness.writeup.document import NumberedFigure
from harness.writeup.hover import POINTS_PER_INCH, spots

DARK_PAGE = "#15181c"
CONTRAST = 3.2
"""Least contrast of a line with the dark page; WCAG 2.1 asks 3 of graphics."""

FURNITURE = frozenset(("#000000", "#222222", "#444444", "#cccccc", "#dddddd", "#ffffff"))
"""Greys of text, axes, grid and paper; any other colour stands for data."""

_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")
_STYLE = re.compile(r'style="[^"]*"')
_PLACES = re.compile(r'(?<= d=")[^"]*|(?<= [xy]=")[^"]*|(?<=translate\()[^)]*')
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")


def packed(text: str) -> str:
    """Text, compressed by gzip and in base64, which a page can hold; the bytes follow from it."""
    return base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()


def width_and_height(item: NumberedFigure) -> tuple[int, int]:
    """Of the figure, in points."""
    width, height = item.drawn.figure.get_size_inches() * POINTS_PER_INCH
    return round(width), round(height)


def to_svg(item: NumberedFigure, colours: set[str]) -> str:
    """The figure as an ``svg`` element; the colours that it uses are added to ``colours``."""
    svg = save(item.drawn, "svg", **{"svg.fonttype": "none"}).decode()
    found = list(spots(item.drawn.figure))
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|\n\s*", " ", svg, flags=re.DOTALL)
    svg = _PLACES.sub(lambda match: _LONG_NUMBER.sub(_shorter, match[0]), svg)
    # Ids are unique in a file of matplotlib's, and the page holds many.
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{item.anchor}-", svg)
    svg = re.sub(r'(<svg [^>]*?)(?: (?:width|height)="[\d.]+pt")+', r"\1", svg, count=1)
    svg = re.sub(r'(<svg [^>]*?) (?:width|height)="[\d.]+pt"', r"\1", svg, count=1)
    label = escape(item.drawn.caption, quote=True)
    width, _ = width_and_height(item)
    style = f"max-width:{1.5 * width:.0f}px"
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{label}" style="{style}" ', 1)

    def as_variable(match: re.Match[str]) -> str:
        tint = match[0].lower()
        colours.add(tint)
        return f"var(--c{tint[1:]},{tint})"

    svg = _STYLE.sub(lambda match: _COLOUR.sub(as_variable, match[0]), svg)
    overlay = "".join(
        f'<rect class="spot" x="{spot.x:.1f}" y="{spot.y:.1f}" width="{spot.width:.1f}" '
        f'height="{spot.height:.1f}" data-tip="{escape(spot.text, quote=True)}"/>'
        for spot in found
    )
    return svg.replace("</svg>", f"{overlay}</svg>")


def _shorter(match: re.Match[str]) -> str:
    """A coordinate to a hundredth of a point, which no screen shows."""
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


@cache
def on_dark(tint: str) -> str:
    """The colour on a dark page: ink and paper change places, dark data are lightened."""
    red, green, blue = to_rgb(tint)
    hue, lightness, saturation = colorsys.rgb_to_hls(red, green, blue)
    if tint in FURNITURE:
        # White becomes the page, black nearly white, and what lies between keeps its order.
        page, ink = to_rgb(DARK_PAGE), 0.93
        return to_hex([ink + (channel - ink) * lightness for channel in page])
    while contrast(to_hex((red, green, blue)), DARK_PAGE) < CONTRAST and lightness < 1:
        lightness += 0.02
        red, green, blue = colorsys.hls_to_rgb(hue, lightness, saturation)
    return to_hex((red, green, blue))


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours (WCAG 2.1), from 1 to 21."""
    high, low = sorted((_luminance(first), _luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(tint: str) -> float:
    red, green, blue = (
        channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4
        for channel in to_rgb(tint)
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
