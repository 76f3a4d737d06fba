"""What a page or a chapter shows under its code, held against what was really seen."""

from __future__ import annotations

import re


def matches(expected: str, seen: str) -> bool:
    """Whether it is as expected: ``...`` is anything within a line, and alone on one any number of lines.

    Blanks at the ends of lines, and empty lines at the end, do not count.
    """
    pattern = "".join(
        r"(?:.*\n)*?" if line.strip() == "..." else ".*".join(map(re.escape, line.rstrip().split("..."))) + r"\n"
        for line in expected.rstrip().splitlines()
    )
    text = "".join(f"{line.rstrip()}\n" for line in seen.rstrip().splitlines())
    return re.fullmatch(pattern, text) is not None
