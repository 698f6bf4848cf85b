"""
Put the committed results into README.md and docs/images; ``--check`` only says whether they are there.

``python -m benchmarks.tables``
"""

import argparse
import sys
from pathlib import Path

from benchmarks import halfcheetah, state_bytes, update
from benchmarks.runner import read_csv

README = Path(__file__).parent.parent / "README.md"
IMAGE = README.parent / "docs" / "images" / "halfcheetah.png"
TABLES = {"halfcheetah": halfcheetah, "state_bytes": state_bytes, "update": update}


def filled(text: str) -> str:
    """
    The text with each table made anew from its results file.

    :param text: with marks ``<!-- name --> ... <!-- end -->``
    """
    for name, module in TABLES.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, mark, rest = text.partition(start)
        if not mark or end not in rest:
            raise ValueError(f"README.md has no place for the table {name}: {start}{end}")
        text = before + start + module.table(read_csv(module.FILE)) + "\n" + rest[rest.index(end) :]
    return text


def main() -> None:
    """Write, or check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if README.md is not up to date")
    text = README.read_text()
    if parser.parse_args().check:
        sys.exit(0 if filled(text) == text else "README.md is not what the results give: run benchmarks.tables")
    README.write_text(filled(text))
    halfcheetah.draw(read_csv(halfcheetah.FILE), IMAGE)


if __name__ == "__main__":
    main()
