"""Chapter 6's figures, drawn from data.

    python book/ch06_the_organization_recovers/draw_figures.py            draw them anew
    python book/ch06_the_organization_recovers/draw_figures.py --check    exit 1 if a figure is not what its data says

    state_machine.svg    the moves of an assignment, as the head of `sovereign_agent.records` lists them
    race.svg             race.json: what two supervisors wrote down when they raced for run-10, once, for real

The chapter draws the reader's own race with `race`, too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from collections.abc import Iterable
from html import escape
from pathlib import Path

from sovereign_agent import records

FIGURES = Path(__file__).resolve().parent / "figures"
Story = list[tuple[float, str, str]]
"""(milliseconds since the start, who, what), in the order in which it was written down."""

STYLE = """\
.card { fill: #ffffff; stroke: #d0d7de }
.box { fill: #f6f8fa; stroke: #57606a; stroke-width: 1.5 }
.inner { fill: #ddf4ff; stroke: #0969da }
.late { fill: #fff1c9; stroke: #9a6700 }
.lost { fill: #ffebe9; stroke: #cf222e }
.won { fill: #dafbe1; stroke: #1a7f37 }
.line { fill: none; stroke: #57606a; stroke-width: 1.5 }
.dashed { stroke-dasharray: 5 4 }
.tip { fill: #57606a }
text { font: 14px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
.small { font-size: 12px; fill: #57606a }
.name { font-weight: 600 }
@media (prefers-color-scheme: dark) {
  .card { fill: #0d1117; stroke: #30363d }
  .box { fill: #161b22; stroke: #8b949e }
  .inner { fill: #0c2d6b; stroke: #58a6ff }
  .late { fill: #3b2900; stroke: #d29922 }
  .lost { fill: #490202; stroke: #f85149 }
  .won { fill: #04260f; stroke: #3fb950 }
  .line { stroke: #8b949e }
  .tip { fill: #8b949e }
  text { fill: #e6edf3 }
  .small { fill: #9da7b1 }
}"""


# --- the state machine ------------------------------------------------------------------------------------

RUNNING_BOX = (200, 56, 220, 248)
BOXES = {
    "CREATED": (24, 150, 116, 44),
    "COMPLETED": (612, 56, 124, 44),
    "BLOCKED": (612, 116, 124, 44),
    "FAILED": (612, 208, 124, 44),
    "CANCELED": (612, 300, 124, 44),
}
HOLDS, RAN_OUT = (216, 90, 188, 62), (216, 222, 188, 62)
"""The two halves of RUNNING. The ledger has one state for both: that a time has passed is not a move."""

ROUTES = {
    ("CREATED", "RUNNING"): ["140,172 200,172"],
    ("CREATED", "CANCELED"): ["82,194 82,332 612,332"],
    ("RUNNING", "COMPLETED"): ["420,121 530,78 612,78"],
    ("RUNNING", "BLOCKED"): ["420,121 530,138 612,138"],
    ("RUNNING", "FAILED"): ["420,121 530,222 612,222", "404,253 530,238 612,238"],
    ("RUNNING", "CANCELED"): ["420,292 530,314 612,314"],
}
"""One polyline for each way on which a move happens."""


def moves(noun: str) -> set[tuple[str, str]]:
    """The moves of a kind of record, from the list at the head of `sovereign_agent.records`."""
    listed = re.search(rf"^ *{noun} +(.+)$", records.__doc__ or "", re.MULTILINE)
    if listed is None:
        raise SystemExit(f"The head of sovereign_agent.records lists no moves of {noun}: look there, and mend `moves`.")
    found = set[tuple[str, str]]()
    for chain in re.split(r" {2,}", listed[1].strip()):
        stations = [re.split(r" *[,|] *", station) for station in chain.split(" -> ")]
        for sources, targets in itertools.pairwise(stations):
            found |= {(source, target) for source in sources for target in targets}
    return found


def state_machine() -> str:
    """The states of an assignment, and who moves it out of RUNNING. Exits if a move has no route here."""
    told = moves("assignment")
    if told != set(ROUTES):
        raise SystemExit(f"The figure and sovereign_agent.records differ in these moves: {sorted(told ^ set(ROUTES))}")
    parts = [
        box(RUNNING_BOX, "box"),
        text(310, 78, "RUNNING", "name"),
        *(box(place, "lost" if name == "FAILED" else "box") for name, place in BOXES.items()),
        *(text(x + w / 2, y + 27, name, "name") for name, (x, y, w, _) in BOXES.items()),
        *(arrow(points) for routes in ROUTES.values() for points in routes),
        box(HOLDS, "inner"),
        text(310, 116, "its attempt holds"),
        text(310, 135, "the worker may renew it", "small"),
        box(RAN_OUT, "late"),
        text(310, 248, "its attempt has run out"),
        text(310, 267, "anybody may act first", "small"),
        arrow("250,152 250,222", "line dashed"),
        text(262, 182, "time passes,", "small", "start"),
        text(262, 197, "nothing is written", "small", "start"),
        text(82, 140, "given, not begun", "small"),
        dot(420, 121),
        text(432, 68, "the worker", "small", "start"),
        text(432, 83, "was first", "small", "start"),
        text(432, 272, "a supervisor was first:", "small", "start"),
        text(432, 287, "worker_lost", "small", "start"),
        text(92, 322, "called off", "small", "start"),
    ]
    return picture(760, 364, "The states of an assignment, and who moves it out of RUNNING", parts)


# --- the race ---------------------------------------------------------------------------------------------

LEFT, RIGHT, LANES = 150, 730, {"supervisor-1": 92, "supervisor-2": 190}
STEPS = [factor * 10.0**power for power in range(-3, 6) for factor in (1, 2, 5)]
MOST_MARKS = 8


def race(story: Story) -> str:
    """Two supervisors on one scale of milliseconds: when each looked, waited for the ledger, and held it."""
    end = max(at for at, _, _ in story) * 1.02
    step = next(step for step in STEPS if end / step < MOST_MARKS)
    parts = [line(f"{LEFT},238 {RIGHT},238"), text(RIGHT, 280, "milliseconds since the start", "small", "end")]
    for number in range(int(end / step) + 1):
        x = LEFT + number * step / end * (RIGHT - LEFT)
        parts += [line(f"{x:.1f},238 {x:.1f},244"), text(x, 260, f"{number * step:g}", "small")]
    for who, y in LANES.items():
        parts += lane(who, y, {what.split()[0]: (at, what) for at, name, what in story if name == who}, end)
    parts += [dot(26, 276), text(36, 280, "looked", "small", "start")]
    parts += [box((96, 269, 24, 14), "late"), text(126, 280, "waited for the ledger", "small", "start")]
    parts += [box((262, 269, 24, 14), "won"), box((290, 269, 24, 14), "lost")]
    parts += [text(320, 280, "had it", "small", "start")]
    return picture(760, 300, "Two supervisors race for one abandoned run", parts)


def lane(who: str, y: int, steps: dict[str, tuple[float, str]], end: float) -> Iterable[str]:
    """One supervisor's line: a dot where it looked, a pale bar while it waited, a full one while it wrote."""

    def x(step: str) -> float:
        return LEFT + steps[step][0] / end * (RIGHT - LEFT)

    changed = int(steps["changed"][1].split()[1])
    kind, verdict = ("won", "changed 1 row, wrote the slip") if changed else ("lost", "changed 0 rows, wrote nothing")
    asked, entered, left = x("asked"), x("entered"), x("left")
    yield text(20, y + 5, who, "name", "start")
    yield line(f"{LEFT},{y} {RIGHT},{y}", "line dashed")
    yield box((asked, y - 9, max(entered - asked, 1), 18), "late")
    yield box((entered, y - 15, max(left - entered, 4), 30), kind)
    yield dot(x("read"), y)
    yield text(LEFT, y - 22, steps["read"][1], "small", "start")
    yield text(max(min(left, RIGHT), LEFT + 200), y + 31, verdict, "small", "end")


# --- drawing ----------------------------------------------------------------------------------------------


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    """A whole SVG file on a card of its own, so that it can be read on a page of any colour."""
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>\n{STYLE}\n</style>\n'
        f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>\n'
        f'<text class="name" x="20" y="32">{escape(title)}</text>\n{body}\n</svg>\n'
    )


def box(place: tuple[float, float, float, float], kind: str) -> str:
    """A rounded rectangle: x, y, width, height."""
    x, y, width, height = place
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    """A line of words."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def dot(x: float, y: float) -> str:
    """A small filled circle."""
    return f'<circle class="tip" cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'


def line(points: str, kind: str = "line") -> str:
    """A polyline."""
    return f'<polyline class="{kind}" points="{points}"/>'


def arrow(points: str, kind: str = "line") -> str:
    """A polyline with a tip at its end."""
    (x0, y0), (x1, y1) = ([float(number) for number in pair.split(",")] for pair in points.split()[-2:])
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    ux, uy = (x1 - x0) / length, (y1 - y0) / length
    corners = [(x1, y1)] + [(x1 - 9 * ux + side * 4.5 * uy, y1 - 9 * uy - side * 4.5 * ux) for side in (1, -1)]
    return line(points, kind) + f'<polygon class="tip" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}"/>'


def main() -> int:
    """Draw, or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    check = parser.parse_args().check
    story = json.loads((FIGURES / "race.json").read_text(encoding="utf-8"))
    differ = []
    for name, drawn in {"state_machine.svg": state_machine(), "race.svg": race(story)}.items():
        path = FIGURES / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != drawn):
            differ.append(name)
        elif not check:
            path.write_text(drawn, encoding="utf-8")
    for name in differ:
        print(f"{FIGURES / name} is not what its data says: draw it anew with python {Path(__file__).name}")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
