"""Data files of the cost model: TOML tables whose entries name their source, and published shapes (models.toml).

Errors name the key.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from nanoserve.config import ModelConfig
from nanoserve.errors import UsageError
from nanoserve.processes.files import read_json_object, unreadable_as_model_error

Tables = Mapping[str, Mapping[str, Any]]
SHIPPED_MODELS = Path(__file__).with_name("models.toml")
_LONGEST_QUOTE = 40
LARGEST = 1e12
"""Limit for any figure, in its unit: far beyond all hardware, and small enough for products."""


def read_toml(path: Path) -> dict[str, Any]:
    """The file's top-level tables.

    Raises:
        UsageError: if it cannot be read or is not TOML, naming it.
    """
    import tomllib

    try:
        if path.exists() and not path.is_file():  # a directory; or a pipe or device, reading which might never end
            raise UsageError(f"{path} is not a regular file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {error}") from error
    except UsageError:
        raise
    except ValueError as error:  # a path with a NUL in it
        raise UsageError(f"cannot read {str(path)!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a table, such as ``devices.a10``; every complaint names it and the key."""

    place: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, tables: Tables, kind: str, name: str, source: str) -> "Entry":
        """The entry ``name`` of the table ``kind``, which must be there.

        Raises:
            UsageError: listing what there is.
        """
        table = tables.get(kind, {})
        if name not in table:
            raise UsageError(f"{source}: there is no {kind}.{name}; there are {', '.join(sorted(table)) or 'none'}")
        if not isinstance(table[name], Mapping):
            raise UsageError(f"{source}: {kind}.{name} must be a table of keys, not {table[name]!r}")
        return cls(f"{source}: {kind}.{name}", table[name])

    def check_keys(self, known: Iterable[str]) -> "Entry":
        """This entry, if it has no other keys and names its source.

        Raises:
            UsageError: naming the first key that is unknown.
        """
        keys = ("source", *known)
        for key in self.values:
            if key not in keys:
                raise UsageError(f"{self.place}: unknown key {key}; known are {', '.join(keys)}")
        self.text("source")
        return self

    def positive(self, key: str, default: float | None = None) -> float:
        """A number above zero; without a default the key must be there.

        Raises:
            UsageError: naming the key.
        """
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not is_number or not 0 < value <= LARGEST:
            found = self._found(key)[:_LONGEST_QUOTE]
            raise UsageError(f"{self.place}: {key} must be a number above 0, found {found}; the most is {LARGEST:g}")
        return float(value)

    def count(self, key: str) -> int:
        """A whole number from 1.

        Raises:
            UsageError: naming the key.
        """
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{self.place}: {key} must be a whole number from 1, found {self._found(key)}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text that is not empty.

        Raises:
            UsageError: naming the key.
        """
        value = self.values.get(key, default)
        if not isinstance(value, str) or not value.strip():
            raise UsageError(f"{self.place}: {key} must be a text, found {self._found(key)}")
        return value

    def flag(self, key: str) -> bool:
        """true or false; false if the key is missing.

        Raises:
            UsageError: naming the key.
        """
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise UsageError(f"{self.place}: {key} must be true or false, found {value!r}")
        return value

    def _found(self, key: str) -> str:
        return repr(self.values[key]) if key in self.values else "nothing"


@cache
def published_shapes() -> Mapping[str, Mapping[str, Any]]:
    """Each model's config.json, as far as its shape goes."""
    tables = read_toml(SHIPPED_MODELS)
    return MappingProxyType(
        {name: _config(Entry.of({"models": tables}, "models", name, SHIPPED_MODELS.name)) for name in tables}
    )


def load_shape(spec: str) -> ModelConfig:
    """The shape of a published model, of a config.json, or of a directory that holds one. No weights are needed.

    Raises:
        UsageError: for an unknown name, listing the known ones.
        ModelError: for a config.json that cannot be used.
    """
    path = Path(spec)
    with unreadable_as_model_error():
        if spec.endswith(".json") and path.is_file():
            return ModelConfig.from_hf(read_json_object(path), source=str(path))
        if path.is_dir():
            return ModelConfig.from_directory(path)
    name = spec.removeprefix("dummy:").lower()
    shapes = published_shapes()
    if name not in shapes:
        raise UsageError(
            f"unknown model {spec!r}: no config.json, no directory with one, and none of {', '.join(shapes)}"
        )
    return ModelConfig.from_hf(shapes[name], source=name)


def _config(entry: Entry) -> Mapping[str, Any]:
    entry.text("source")
    config = {key: value for key, value in entry.values.items() if key not in ("source", "null_keys")}
    return config | dict.fromkeys(entry.values.get("null_keys", ()))
