"""Where a server is, as users type it."""

import pytest

from nanoserve.errors import UsageError
from nanoserve.server.client.address import ServerAddress, key_headers, parse_url


@pytest.mark.parametrize(
    ("text", "address", "api"),
    [
        ("http://127.0.0.1:8000", ServerAddress("http", "127.0.0.1", 8000), "/v1"),
        ("http://localhost:8000/v1/", ServerAddress("http", "localhost", 8000), "/v1"),
        (
            "https://example.org/api/v1",
            ServerAddress("https", "example.org", 443, "/api"),
            "/api/v1",
        ),
        ("http://[::1]:80", ServerAddress("http", "::1", 80), "/v1"),
    ],
)
def test_what_users_type(text: str, address: ServerAddress, api: str) -> None:
    assert parse_url(text) == address
    assert address.api == api


def test_an_address_reads_as_it_was_given() -> None:
    for text in ("http://127.0.0.1:8000", "https://example.org/api", "http://[::1]:8000"):
        assert str(parse_url(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "localhost:8000",
            "127.0.0.1",
            "ftp://host",
            "http://",
            "http://host:port",
            "http://host:99999",
        ),
        *(
            "http://ho st",
            "http://host/\r\nx: y",
            "http://höst",
            "http://host?a=b",
            "http://host#x",
            "http://[::1",
            "http://a..b",
        ),
    ],
)
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(UsageError, match=r"--url takes http://HOST:PORT"):
        parse_url(text)


def test_secrets_do_not_belong_into_a_url() -> None:
    with pytest.raises(UsageError, match="give a key with --api-key instead"):
        parse_url("http://me:secret@host")


def test_a_key_is_a_header_or_an_error_that_does_not_repeat_it() -> None:
    assert key_headers("sk-1") == {"authorization": "Bearer sk-1"}
    assert key_headers(None) == key_headers("") == {}
    with pytest.raises(UsageError) as caught:
        key_headers("sk-1\r\nx-evil: 1")
    assert "sk-1" not in str(caught.value)
