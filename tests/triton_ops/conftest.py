"""Every operator is tested in both its implementations: plain torch, and the CPU's own where they
can be built."""

from collections.abc import Iterator

import pytest

from triton_ops import reference_operators
from triton_ops.cpu import cpu_operators


@pytest.fixture(scope="module", params=["plain", "cpu"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "plain":
        with reference_operators():
            yield "plain"
    elif cpu_operators().wait():
        yield "cpu"
    else:
        pytest.skip(f"no CPU operators: {cpu_operators().problem}")
