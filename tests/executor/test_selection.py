"""Choosing without sorting gives what sorting gives."""

import math
import struct

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triton_ops.sampling import order_keys, smallest_sufficient_key, top_tokens

floats = st.floats(width=32, allow_nan=False)
# Few distinct values, so that ties are common.
rows = st.lists(st.sampled_from([-3.0, -1.5, 0.0, 0.25, 0.5, 7.0]), min_size=1, max_size=40)


@settings(deadline=None)
@given(floats, floats)
def test_keys_are_ordered_as_the_numbers_are(left: float, right: float) -> None:
    key_left, key_right = order_keys(torch.tensor([[left, right]], dtype=torch.float32))[0].tolist()
    assert 0 <= key_left < 2**32
    if left < right:
        assert key_left < key_right
    if struct.pack("f", left) == struct.pack("f", right):
        assert key_left == key_right


@settings(deadline=None)
@given(rows, st.integers(1, 50))
def test_top_tokens_are_the_largest_with_ties_to_the_lower_id(
    values: list[float], count: int
) -> None:
    chosen = top_tokens(torch.tensor([values]), count)[0].tolist()
    assert chosen == sorted(range(len(values)), key=lambda token: (-values[token], token))[:count]


@settings(deadline=None)
@given(st.lists(st.tuples(floats, st.integers(0, 2**40)), min_size=1, max_size=40), st.data())
def test_smallest_sufficient_key_is_where_the_sorted_sum_arrives(
    items: list[tuple[float, int]], data: st.DataObject
) -> None:
    total = sum(weight for _, weight in items)
    share = data.draw(st.floats(1e-12, 1.0) | st.just(1.0))
    needed = min(math.ceil(share * total), total)
    keys = order_keys(torch.tensor([[value for value, _ in items]], dtype=torch.float32))
    weights = torch.tensor([[weight for _, weight in items]])
    found = smallest_sufficient_key(
        keys, weights, torch.tensor([share], dtype=torch.float64)
    ).item()
    pairs = list(zip(keys[0].tolist(), weights[0].tolist(), strict=True))
    assert sum(weight for key, weight in pairs if key >= found) >= needed
    assert sum(weight for key, weight in pairs if key > found) < needed or needed == 0
