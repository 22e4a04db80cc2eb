"""The code of docs/policies.md runs as the page says."""

import re
from pathlib import Path

import pytest

from nanoserve.errors import UsageError
from nanoserve.request import Request, SamplingParams
from nanoserve.scheduler import Policy, make_policy
from nanoserve.scheduler.load import ORDERS
from tests.scheduler.golden import TRACE, play

PAGE = (Path(__file__).parents[2] / "docs/policies.md").read_text()
BLOCKS = {
    re.findall(r"class (\w+)", block)[0]: block
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
}


@pytest.fixture
def policies(tmp_path: Path) -> dict[str, str]:
    """The names under which --policy takes the classes of the page."""
    for name, block in BLOCKS.items():
        (tmp_path / f"{name.lower()}.py").write_text(block)
    return {name: f"{tmp_path / name.lower()}.py:{name}" for name in BLOCKS}


@pytest.mark.parametrize("name", BLOCKS)
def test_each_policy_of_the_page_brings_the_trace_to_its_end(
    name: str, policies: dict[str, str]
) -> None:
    plans = play(make_policy(policies[name], 8), TRACE, num_blocks=7)
    assert plans[0].startswith("step 0: begin 0")


def test_the_parameters_and_ranks_of_the_page(policies: dict[str, str]) -> None:
    assert make_policy(f"{policies['Shares']}:prompts=0.2", 64).prompts == 0.2  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="prompts must be at least 0 and below 1"):
        make_policy(f"{policies['Shares']}:prompts=1", 64)
    policy: Policy = make_policy(policies["ShortAnswers"], 64)
    assert (policy.aging, policy.ranks) == (300, True)
    requests = [
        Request(name, (1,), SamplingParams(max_tokens=tokens), seed=0, priority=priority)
        for name, tokens, priority in (
            ("long", None, 0),
            ("short", 9, 0),
            ("late", 1, 1),
            ("urgent", 4096, -1),
        )
    ]
    ranked = sorted(requests, key=lambda request: policy.rank(request, 0.0))
    assert [request.request_id for request in ranked] == ["urgent", "short", "long", "late"]


def test_the_page_names_every_order() -> None:
    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE) == list(ORDERS)
