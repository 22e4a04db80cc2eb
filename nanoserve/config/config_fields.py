"""Typed access to a parsed config.json. No torch here."""

from collections.abc import Collection, Mapping
from typing import Any

from nanoserve.errors import ModelError, shown

LEAST_ROPE_NUMBER = 1e-6
_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e30


class ConfigFields:
    """Typed access to a JSON object; every complaint names the file and the key."""

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value, or the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        return value

    def _fail(self, key: str, wanted: str) -> ModelError:
        return ModelError(
            f"{self.source}: {key} must be {wanted}, found {shown(self.values.get(key))}"
        )

    def section(self, key: str) -> dict[str, Any] | None:
        value = self.get(key)
        if value is not None and not isinstance(value, dict):
            raise self._fail(key, "an object")
        return value

    def positive(self, key: str, default: int | None = None, *, most: int = _MAX_INTEGER) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self._fail(key, "a positive integer")
        if value > most:
            raise self._fail(key, f"at most {most}")
        return value

    def offset(self, key: str, default: int, period: int) -> int:
        """A place in a period of layers, counted from 0."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < period:
            raise self._fail(key, f"a layer of a period of {period}, counted from 0")
        return value

    def number(self, key: str, default: float, *, least: float = -_MAX_NUMBER) -> float:
        value = self.get(key, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) <= _MAX_NUMBER
        ):
            raise self._fail(key, "a number")
        if value < least:
            raise self._fail(key, f"at least {least:g}")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        if self.get(key) is None:
            return None
        return self.number(key, 0.0)

    def positive_numbers(self, key: str, *, count: int) -> tuple[float, ...]:
        value = self.get(key, [])
        if not isinstance(value, list) or len(value) not in (0, count):
            raise self._fail(key, f"a list of {count} numbers")
        entries = [ConfigFields({key: entry}, self.source) for entry in value]
        return tuple(entry.number(key, 1.0, least=LEAST_ROPE_NUMBER) for entry in entries)

    def whole(self, key: str) -> int | None:
        value = self.optional_number(key)
        if value is None:
            return None
        if not value.is_integer():
            raise self._fail(key, "a whole number")
        return int(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._fail(key, "true or false")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        found = self.get(key, [])
        if not isinstance(found, list):
            found = [found]
        for token in found:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise self._fail(key, "an integer from 0 on or a list of them")
        return tuple(found)

    def layer_types(self, known: Collection[str], num_layers: int) -> list[str] | None:
        """The kind of each layer, one of those that are known; None without `layer_types`."""
        found = self.get("layer_types")
        if found is None:
            return None
        if not isinstance(found, list) or len(found) != num_layers:
            listed = shown(found)
            if isinstance(found, list):
                listed = str(len(found))
            raise ModelError(
                f"{self.source}: layer_types must name a kind for each of {num_layers} layers, "
                f"found {listed}"
            )
        for kind in found:
            if not isinstance(kind, str) or kind not in known:
                raise ModelError(
                    f"{self.source}: layer_types names {shown(kind)}; known are "
                    f"{' and '.join(known)}"
                )
        return found
