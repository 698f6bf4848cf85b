"""
Puts line numbers into the map from the paper to the code: ``python -m docs.lines``.

The page refers to a line as `` `file:number` `code` ``, where the code is part of that line and of no other.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "paper_map.md"
REFERENCE = re.compile(r"`([\w./]+\.\w+):\d+` `([^`]+)`")


def located(text: str) -> str:
    """
    The text with the numbers that its references have now.

    :param text: of the page
    :raises ValueError: for code that stands on no line of its file, or on several
    """
    return REFERENCE.sub(lambda found: f"`{found[1]}:{_line_of(found[1], found[2])}` `{found[2]}`", text)


def _line_of(file: str, code: str) -> int:
    lines = (ROOT / file).read_text().splitlines()
    numbers = [number for number, line in enumerate(lines, start=1) if code in line]
    if len(numbers) != 1:
        raise ValueError(f"{file} has {len(numbers)} lines with {code!r}; the map from the paper refers to one.")
    return numbers[0]


if __name__ == "__main__":
    PAGE.write_text(located(PAGE.read_text()))
