"""Data files of the cost model: TOML tables whose entries name their source, read with errors that name the key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.errors import UsageError

Tables = Mapping[str, Mapping[str, Any]]
_LONGEST_QUOTE = 40
LARGEST = 1e12
"""Of any figure, in its unit: far beyond all hardware, and small enough to be multiplied with."""


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
