"""Typed access to parsed JSON whose errors name the file, the key and the value."""

from typing import Any, TypeVar, cast

from model_adapter.errors import ConfigError

_T = TypeVar("_T")
_REQUIRED: Any = object()


class Section:
    """One object of a `config.json`. `origin` is what errors call it."""

    def __init__(self, values: Any, origin: str) -> None:
        if not isinstance(values, dict):
            raise ConfigError(f"{origin} must be a JSON object, not {type(values).__name__}")
        self.values: dict[str, Any] = values
        self.origin = origin

    def section(self, key: str) -> "Section":
        """A nested object that must be there."""
        return Section(self._get(key), f"{self.origin}: {key}")

    def optional_section(self, *keys: str) -> "Section | None":
        """The first of the nested objects that is there and not null."""
        for key in keys:
            if self.values.get(key) is not None:
                return self.section(key)
        return None

    def integer(self, key: str, least: int = 0, default: int = _REQUIRED) -> int:
        """An integer of at least `least`."""
        value = self._get(key, default)
        if type(value) is not int or value < least:
            raise ConfigError(f"{self.origin}: {key} must be an integer ≥ {least}, not {value!r}")
        return value

    def text(self, key: str) -> str:
        """A string that is not empty."""
        value = self._get(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{self.origin}: {key} must be a string, not {value!r}")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number that is not negative."""
        value = self._get(key, default)
        if type(value) not in (int, float) or not 0 <= value < float("inf"):
            raise ConfigError(f"{self.origin}: {key} must be a number ≥ 0, not {value!r}")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers that are not negative."""
        value = self._get(key)
        if not isinstance(value, list) or any(type(v) is not int or v < 0 for v in value):
            raise ConfigError(f"{self.origin}: {key} must be a list of integers ≥ 0, not {value!r}")
        return tuple(value)

    def expect(self, key: str, supported: _T) -> None:
        """Refuse a value other than the one implemented; an absent key means that one."""
        value = cast(_T, self.values.get(key, supported))
        if value != supported:
            raise ConfigError(
                f"{self.origin}: {key} {value!r} is not supported; only {supported!r} is"
            )

    def _get(self, key: str, default: Any = _REQUIRED) -> Any:
        value = self.values.get(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"{self.origin}: key {key!r} is missing")
        return value
