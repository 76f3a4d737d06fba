# @title Set-up: run this cell first, in every fresh kernel
# Supplied with the notebook, and no part of the exercise. It holds the teaching files of this edition as text
# (Base85 of what zlib compressed), checks each against its SHA-256, writes them to a scratch folder and lets Python
# find them there. It installs and downloads nothing. Run it again to get the files as they were; your work is kept.

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import sqlite3
import sys
import tempfile
import zlib
from pathlib import Path

WORK = "work"  # the folder of your work, below practical-work/
REQUIRED = {"pydantic": ["2", "2"]}  # what must be installed: at least this release, and the one that was tested
FILES = {"src/name.py": "sha256"}
PAYLOAD = """
"""


def course_release(text):
    return [int(number) for number in re.findall(r"\d+", text)[:3]]


def course_is_there(name, least):
    try:
        return course_release(importlib.metadata.version(name)) >= course_release(least)
    except importlib.metadata.PackageNotFoundError:
        return False


def course_check():
    if os.name != "posix":
        return "This notebook needs Linux or macOS: on Windows, open it in Google Colab or in WSL."
    if sys.version_info < (3, 11) or sqlite3.sqlite_version_info < (3, 37):
        return "This notebook needs Python 3.11 or newer with SQLite 3.37 or newer: choose another kernel."
    missing = [f'"{name}=={tested}"' for name, (least, tested) in REQUIRED.items() if not course_is_there(name, least)]
    if missing:
        line = f"%pip install {' '.join(missing)}"
        what_to_do = "Run this line in a cell of its own, restart the kernel, and start again:"
        return f"Packages are missing. {what_to_do}  {line}"
    return ""


def course_files():
    files = json.loads(zlib.decompress(base64.b85decode("".join(PAYLOAD.split()))))
    damaged = [name for name in FILES if hashlib.sha256(files.get(name, "").encode()).hexdigest() != FILES[name]]
    if damaged or files.keys() != FILES.keys():
        message = (
            f"This copy of the notebook is damaged ({', '.join(damaged) or 'its list of files'}): download it again."
        )
        raise ValueError(message)
    return files


def course_unpack(root):
    for name, text in course_files().items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    source = str(root / "src")
    sys.path[:] = [source, *(place for place in sys.path if place != source)]
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in {"", source}]
    os.environ["PYTHONPATH"] = os.pathsep.join([source, *places])
    for name, module in list(sys.modules.items()):  # another copy, installed in this kernel, is not the one we study
        ours = name.split(".")[0] in {"sovereign_agent", "reference_organizations"}
        if ours and not (getattr(module, "__file__", None) or "").startswith(source):
            del sys.modules[name]


if course_problem := course_check():
    raise RuntimeError(course_problem)
COURSE_SCRATCH = globals().get("COURSE_SCRATCH") or tempfile.TemporaryDirectory(prefix="course-")
COURSE_ROOT = Path(COURSE_SCRATCH.name).resolve()
COURSE_WORK = Path("practical-work", WORK).resolve()
COURSE_WORK.mkdir(parents=True, exist_ok=True)
course_unpack(COURSE_ROOT)
print(f"Set-up is complete: {len(FILES)} teaching files were verified; your work is kept in practical-work/{WORK}")
