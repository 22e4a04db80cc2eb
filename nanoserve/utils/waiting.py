"""A wait as a chat and a server tell of it."""

from typing import NamedTuple, Self


class Waiting(NamedTuple):
    """A wait for something, and how far that is: ("loading", "45%")."""

    what: str
    amount: str = ""

    def after(self, seconds: float) -> str:
        """Say it with the time that it takes: `loading 4 s`, `loading 45%, 4 s`, `prompt 512 of
        2,048, 4 s`."""
        if not self.amount:
            return f"{self.what} {int(seconds)} s"
        return f"{self.what} {self.amount}, {int(seconds)} s"

    @classmethod
    def for_stage(cls, stage: str, done: int, total: int) -> Self:
        """A stage of a start. One that only begins and ends has no share."""
        if total <= 1:
            return cls(stage)
        return cls(stage, f"{done / total:.0%}")
