"""The frame of every picture: a white SVG sheet with our font."""

from collections.abc import Iterable


def framed(width: float, height: float, parts: Iterable[str], font_size: int = 11) -> str:
    """Return a picture of this size in pixels that contains these SVG elements.

    >>> framed(20, 10, ["<circle/>"]).splitlines()[1:]
    ['<rect width="20" height="10" fill="#ffffff"/>', '<circle/>', '</svg>']
    """
    size = f'width="{width:.0f}" height="{height:.0f}"'
    font = f'font-family="system-ui, Helvetica, Arial, sans-serif" font-size="{font_size}"'
    sheet = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" {size} {font}>'
    return "\n".join([sheet, f'<rect {size} fill="#ffffff"/>', *parts, "</svg>"])
