"""Who is protected from pages that call the server by a name of their own, and how names are let
in."""

import pytest

from nanoserve.commands.serve import HttpOptions
from nanoserve.server.hosts import is_allowed


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_a_server_without_a_key_on_the_machines_own_address_knows_its_names(host: str) -> None:
    allowed = HttpOptions(host=host).checked_hosts()
    assert allowed is not None
    for name in (b"localhost:8000", (f"[{host}]" if ":" in host else host).encode()):
        assert is_allowed(name, allowed)
    for name in (b"evil.example", b"127.0.0.1.evil.example"):
        assert not is_allowed(name, allowed)


def test_names_can_be_let_in() -> None:
    allowed = HttpOptions(allowed_hosts=["Box.local", "[fd00::1]"]).checked_hosts()
    assert allowed is not None
    for host in (b"box.local", b"BOX.local:8000", b"[fd00::1]:80", b"localhost"):
        assert is_allowed(host, allowed)
    assert not is_allowed(b"evil.box.local", allowed)


@pytest.mark.parametrize(
    "options", [{"api_key": ["k"]}, {"host": "0.0.0.0", "insecure": True}], ids=str
)
def test_others_answer_to_every_name_unless_told(options: dict[str, object]) -> None:
    assert HttpOptions(**options).checked_hosts() is None  # type: ignore[arg-type]
    named = HttpOptions(**options, allowed_hosts=["box.local"]).checked_hosts()  # type: ignore[arg-type]
    assert named is not None and not is_allowed(b"evil.example", named)
