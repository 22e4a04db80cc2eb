"""Commands of the laboratory run as the others do."""

from tests.commands.conftest import command, fake

__all__ = ["command", "fake"]
