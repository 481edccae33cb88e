"""Settings for people: a daemon's as TOML, and all there are as docs/settings.md.

`make settings` writes that page. What a setting means stands in the docstring of
its class in `kvstore.config`, behind its name in backquotes and a colon.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvstore.config import DaemonConfig

_UNITS = (("bytes", "bytes"), ("s", "seconds"), ("fraction", "share, 0 to 1"))
_SIZES = ("TiB", "GiB", "MiB", "KiB")
_PAGE_HEAD = """# Settings
Written by `make settings` from `kvstore/config.py`; edit that.

A TOML file for `kvstored --config` has a table per section below. Each setting can be given on the
command line as well, as `--set dram.budget_bytes=4GiB`, and to an embedded store as a keyword of
`kvstore.connect`. Sizes are bytes, or text with a unit. `kvstored --print-config` prints what a
daemon would run with, in the form that `--config` takes.
"""


def size_text(n: int) -> str:
    """`4GiB` where that is exact, else the number."""
    for power, unit in zip((40, 30, 20, 10), _SIZES, strict=True):
        if n and not n % (1 << power):
            return f"{n >> power}{unit}"
    return str(n)


def _value(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | Path):
        return json.dumps(str(value), ensure_ascii=False)
    if isinstance(value, tuple):
        return json.dumps(value)
    if isinstance(value, int) and _unit(name) == "bytes" and not size_text(value).isdigit():
        return f'"{size_text(value)}"'
    return repr(value)


def as_toml(settings: DaemonConfig) -> str:
    """All settings, so that `--config` makes a daemon that runs as this one would. What is unset
    is left out, and where there is no SSD tier, its directory too."""
    return "\n".join(_tables("", settings)) + "\n"


def _tables(path: str, settings: BaseModel) -> Iterator[str]:
    nested = []
    if path:
        yield f"\n[{path}]"
    for name, value in settings:
        if isinstance(value, BaseModel):
            nested.append((f"{path}.{name}".lstrip("."), value))
        elif value is not None and not (name == "dir" and not getattr(settings, "has_ssd", True)):
            yield f"{name} = {_value(name, value)}"
    for inner, value in nested:
        yield from _tables(inner, value)


def _unit(name: str) -> str:
    words = name.split("_")
    return next((unit for word, unit in _UNITS if word in words[1:]), "")


def meanings(cls: type[BaseModel]) -> dict[str, str]:
    """What the docstring of a class says of its settings, by name."""
    docs = [base.__doc__ or "" for base in cls.__mro__ if base.__module__ == cls.__module__]
    text = " ".join(" ".join(docs).split())
    parts = re.split(r"((?:`\w+`, )*`\w+`): ", text)
    said: dict[str, str] = {}
    for names, meaning in zip(parts[1::2], parts[2::2], strict=True):
        for name in re.findall(r"\w+", names):
            said[name] = meaning.strip()
    return said


def _rows(cls: type[BaseModel]) -> Iterator[str]:
    said = meanings(cls)
    yield "| key | default | unit | meaning |\n|---|---|---|---|"
    for name, field in cls.model_fields.items():
        if isinstance(field.default, BaseModel):
            continue
        default = "unset" if field.default is None else f"`{_value(name, field.default)}`"
        meaning = said.get(name, "").replace("|", "\\|")
        yield f"| `{name}` | {default} | {_unit(name)} | {meaning} |"


def _sections(path: str, settings: BaseModel) -> Iterator[str]:
    yield f"\n## {path or 'Top level'}"
    yield from _rows(type(settings))
    for name, value in settings:
        if isinstance(value, BaseModel):
            yield from _sections(f"{path}.{name}".lstrip("."), value)


def page() -> str:
    """docs/settings.md."""
    return _PAGE_HEAD + "\n".join(_sections("", DaemonConfig())) + "\n"
