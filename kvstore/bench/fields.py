"""Fields of a trace's entries, checked: what can't be right is an error that says where it is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore.errors import InvalidRequest

_SECONDS_MAX = 1e12
TOKENS_MAX = 1 << 30
"""Of one prompt."""
_SHOWN_CHARS = 60
_REQUIRED: Any = object()


def _integers(value: object, least: int, most: int) -> npt.NDArray[np.int64] | None:
    """A list as an array, where it is one of whole numbers within the limits; None where not."""
    if not isinstance(value, list):
        return None
    try:
        array = np.array(value) if value else np.zeros(0, np.int64)
    except ValueError:
        return None
    if array.ndim != 1 or array.dtype.kind != "i":
        return None
    return array if not len(array) or (array.min() >= least and array.max() <= most) else None


@dataclass(frozen=True, slots=True)
class Fields:
    """One entry. `where`: the file, and the line or the part of it. The calls give the value of a
    field, or the default where it is absent, and raise `InvalidRequest` naming file, line, field
    and value."""

    where: str
    entry: dict[str, Any]

    def _get(self, name: str, default: Any) -> Any:
        value = self.entry.get(name, default)
        if value is _REQUIRED:
            raise InvalidRequest(f"{self.where} has no field {name!r}")
        return value

    def wrong(self, name: str, value: object, why: str) -> InvalidRequest:
        """The error for a value of a field."""
        text = repr(value)
        shown = text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
        return InvalidRequest(f"{self.where}: {name} is {shown}, {why}")

    def number(
        self, name: str, default: Any = _REQUIRED, per_s: float = 1, least_s: float = -_SECONDS_MAX
    ) -> float:
        """A time in seconds; the entry has `per_s` of its units for each."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, value, "not a number")
        # NaN is within nothing; a whole number may be too large for a float
        if not least_s * per_s <= value <= _SECONDS_MAX * per_s:
            raise self.wrong(name, value, f"not between {least_s:g} and {_SECONDS_MAX:g} s")
        return value / per_s

    def whole(self, name: str, default: Any = _REQUIRED) -> int:
        """A whole number, as 3 or as 3.0."""
        value = self._get(name, default)
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole:
            raise self.wrong(name, value, "not a whole number")
        return int(value)

    def tokens(self, name: str, default: Any = _REQUIRED, least: int = 0) -> int:
        """A number of tokens."""
        value = self.whole(name, default)
        if not least <= value <= TOKENS_MAX:
            raise self.wrong(name, value, f"not between {least} and {TOKENS_MAX:,} tokens")
        return value

    def ids(
        self,
        name: str,
        default: Any = _REQUIRED,
        least: int = -(1 << 63),
        most: int = (1 << 63) - 1,
        text: bool = False,
    ) -> list[Any]:
        """A list of whole numbers from `least` to `most`; and of text, where `text` says so."""
        value = self._get(name, default)
        if not isinstance(value, list):
            raise self.wrong(name, value, "not a list of ids")
        # without a loop for the millions of ids that are as they should be
        if _integers(value, least, most) is not None:
            return value
        for one in value:
            if type(one) is int and least <= one <= most:
                continue
            if not (text and type(one) is str):
                raise self.wrong(f"one of {name}", one, f"not a whole number {least} … {most}")
        return value

    def id_array(self, name: str, least: int, most: int) -> npt.NDArray[np.int64]:
        """As `ids`, whole numbers alone."""
        array = _integers(self._get(name, _REQUIRED), least, most)
        return np.array(self.ids(name, _REQUIRED, least, most)) if array is None else array

    def text(self, name: str, default: Any = _REQUIRED) -> str:
        """A piece of text."""
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.wrong(name, value, "not text")
        return value

    def objects(self, name: str) -> Iterator["Fields"]:
        """The objects of a list within the entry."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list):
            raise self.wrong(name, value, "not a list")
        for i, one in enumerate(value):
            if not isinstance(one, dict):
                raise self.wrong(f"{name}[{i}]", one, "not an object")
            yield Fields(f"{self.where}, {name}[{i}]", one)

    def group(self, name: str) -> "Fields":
        """An object within the entry."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, dict):
            raise self.wrong(name, value, "not an object")
        return Fields(f"{self.where}, {name}", value)
