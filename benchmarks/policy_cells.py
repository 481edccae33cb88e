"""The cells of the policies' table, kept in a file while it grows.

A cell is one policy at one capacity of one trace. It is kept with a digest of the code that made it
(`version`), so that a run that was broken off goes on where it was, and after a change of the code
exactly the cells are made anew that it could have changed.
"""

import ast
import json
import os
import platform
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

_ROOMS = ("kvstore.bench.", "kvstore.eviction.")
_DIGITS = 12


def version(*things: Any) -> str:
    """A digest of the code of classes and functions, and of all in the simulator and the policies
    that it uses. Comments and layout do not count."""
    modules, todo = set[str](), [thing.__module__ for thing in things]
    while todo:
        name = todo.pop()
        if name not in modules and name.startswith(_ROOMS):
            modules.add(name)
            used = vars(sys.modules[name]).values()
            todo += {getattr(thing, "__module__", None) or "" for thing in used}
    digest = sha256()
    for name in sorted(modules):
        source = Path(str(sys.modules[name].__file__)).read_text()
        digest.update(f"{name} {ast.dump(ast.parse(source))}\n".encode())
    return digest.hexdigest()[:_DIGITS]


class Results:
    """What was measured, by trace; written to `path` (None: nowhere) after every addition."""

    def __init__(self, path: Path | None, smoke: bool) -> None:
        self._path = path
        self.whole: dict[str, Any] = {"benchmark": "policies", "smoke": smoke, "traces": {}}
        if path is not None and path.exists():
            self.whole = json.loads(path.read_text())
        self.whole["machine"] = platform.machine()

    def of(self, trace: str) -> dict[str, Any]:
        """All that is known of one trace."""
        known: dict[str, Any] = self.whole["traces"].setdefault(trace, {})
        return known

    def lacks(self, trace: str, part: str, versions: dict[str, str]) -> list[str]:
        """Those of the cells, given with their versions, that are missing or of other code."""
        cells = self.of(trace).get(part, {})
        return [name for name, of in versions.items() if cells.get(name, {}).get("version") != of]

    def add(self, trace: str, key: str, value: Any, part: str | None = None) -> None:
        """Note a value, or a cell of a part."""
        known = self.of(trace)
        (known if part is None else known.setdefault(part, {}))[key] = value
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.whole, indent=1) + "\n")
        os.replace(new, self._path)
