"""Commands of the laboratory run as the others do."""

from collections.abc import Callable

import pytest

from tests.commands.conftest import command, fake

__all__ = ["command", "fake"]


@pytest.fixture
def refused(command: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """refused(WORDS, says): the command prints no result, and one line on stderr that says this,
    which is returned."""

    def check(words: list[str], says: str, exit_code: int = 2) -> str:
        code, out, err = command(*words)
        assert (code, out) == (exit_code, ""), err
        assert says in err
        assert len(err.splitlines()) == 1
        assert "Traceback" not in err
        assert "unexpected" not in err
        return err

    return check
