"""Two hosts for each module of tests, where the machine can play them."""

from collections.abc import Iterator

import pytest

from scripts.two_hosts import Host, NoHosts, two_hosts


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[Host, Host]]:
    """Gone behind the last test, with everything that still runs on them."""
    try:
        with two_hosts() as joined:
            yield joined
    except NoHosts as error:
        pytest.skip(str(error))
