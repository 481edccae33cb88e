"""The CUDA source as one text: what NVRTC gets, and what the tests compile with nvcc."""

import re
from functools import cache
from importlib import resources
from typing import Final

ENTRY_FILE: Final = "device_kernels.cu"
OPTIONS: Final = ("-std=c++17", "--fmad=false")
"""Every rounding is the source's: nothing may be contracted."""

_INCLUDE: Final = re.compile(r'^#include "([a-z0-9_]+\.h)"$')


@cache
def device_source() -> str:
    """The entry points with every header in its place, each once.

    One text, so that a cache of compiled kernels which knows only the text can't hold a stale one.
    """
    lines: list[str] = []
    _append(ENTRY_FILE, set(), lines)
    return "\n".join(lines) + "\n"


def _append(name: str, seen: set[str], lines: list[str]) -> None:
    if name in seen:
        return
    seen.add(name)
    text = resources.files("kernels").joinpath("csrc", name).read_text("utf-8")
    for line in text.splitlines():
        if line == "#pragma once":
            continue
        include = _INCLUDE.match(line)
        if include:
            _append(include.group(1), seen, lines)
        else:
            lines.append(line)
