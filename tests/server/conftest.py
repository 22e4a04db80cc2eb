"""One server on the bundled model for all tests that only ask it something."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.starting import Server, running

MODEL = ("--dtype", "float32", "--kv-cache-memory", "64MiB", "--threads", "1", "--eager")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with running(*MODEL, "--client-timeout", "2") as server:
        yield server


@pytest.fixture(scope="session")
def client(server: Server) -> openai.OpenAI:
    """OpenAI's own client, which does not try again."""
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=240)
