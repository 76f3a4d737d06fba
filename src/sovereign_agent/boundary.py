"""The boundary of a run: what its program must leave as it is, looked at before it starts and after its end.

It looks only at what can change and tells so at once: a few names, where each lies, how large it is and when it was
changed. It reads no content, and the ledger least of all, because to close a descriptor of it would drop this
process's locks. It does not know who changed a thing, so it does not guess: whoever writes in these places while a
program runs fails that run. It is no sandbox; what it does not look at, it does not see.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

SHOWN = 10
"""How many violations are named."""

_UNCHANGED = ("sovereign.toml", ".sovereign/organization.authority")
_IN_PLACE = (".sovereign", ".sovereign/runs", ".sovereign/organization.db")
_EXPECTED = re.compile(
    r"organization\.(authority|db(\.restore_[0-9a-f]{32}\.staging)?(-wal|-shm|-journal)?)|probes\.json|runs|__pycache__"
    r"|\.(sovereign\.toml|organization\.authority|probes\.json)\.[0-9a-f]{16}"
)
"""What this program itself, or Python for a check of the organization's own, writes while a run is under way."""

Mark = tuple[int, ...]


class Boundary:
    """One run's folder and its surroundings as they are now, before its program starts, to compare with later.

    Raises OSError when the folder or its root is not there.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self._root = root
        self._own = f".sovereign/runs/{folder.name}"
        folder.touch()  # so that its time of change is now, by the clock of the file system, which may not be ours
        self._since = folder.lstat().st_ctime_ns
        self._entries_changed_at = root.stat().st_mtime_ns
        self._before = self._look()
        self._inside = {mark(each.lstat()) for each in folder.rglob("*")}

    def is_stale(self, file: os.stat_result) -> bool:
        """Whether a file of the run stood in its folder before, and is as it was."""
        return mark(file) in self._inside

    def violations(self) -> tuple[str, ...]:
        """The names, relative to the root, of what has changed and must not have: the first of them, made printable."""
        before, after = self._before, self._look()
        changed = {name for name in before | after if before.get(name) != after.get(name)}
        with suppress(OSError):
            if self._root.stat().st_mtime_ns != self._entries_changed_at:
                changed |= {each.name for each in self._root.iterdir() if each.name not in after and self._is_new(each)}
        named = [printable(name) for name in sorted(changed)]
        return (*named[:SHOWN], "and more") if len(named) > SHOWN else tuple(named)

    def _look(self) -> dict[str, Mark]:
        unchanged = (*_UNCHANGED, f"{self._own}.lock", f"{self._own}/receipt.json", f"{self._own}/receipt.json.sha256")
        seen = {name: self._mark(name) for name in unchanged}
        seen |= {name: self._mark(name)[:2] for name in (*_IN_PLACE, self._own)}
        with suppress(OSError):  # a folder that is no longer one has another mark already
            inside = [each.name for each in (self._root / ".sovereign").iterdir()]
            seen |= {f".sovereign/{name}": () for name in inside if not _EXPECTED.fullmatch(name)}
        return seen

    def _mark(self, name: str) -> Mark:
        with suppress(OSError):
            return mark(os.lstat(self._root / name))
        return ()

    def _is_new(self, entry: Path) -> bool:
        return not _EXPECTED.fullmatch(entry.name) and self._mark(entry.name)[-1:] > (self._since,)


def mark(info: os.stat_result) -> Mark:
    """What tells a file from another and from itself before a change: device, inode, links, bytes, times in ns."""
    return info.st_dev, info.st_ino, info.st_nlink, info.st_size, info.st_mtime_ns, info.st_ctime_ns


def printable(name: str) -> str:
    """The end of a file's name as text that can be stored and printed, whatever bytes it is made of."""
    return os.fsencode(name).decode("utf-8", "backslashreplace").replace("\0", "")[-200:]
