"""Cases of `rotate_and_write`, and its arithmetic in float64.

Whatever must not be read or written is NaN: the padding between projected rows, keys and values of
tokens without a slot, the slots that must stay, and all of the output before the call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-5
NUM_BLOCKS, BLOCK_SIZE = 3, 16
SLOTS = (33, -1, 0, 47, 16, -1)


@dataclass(frozen=True)
class Case:
    """Arguments of the operator, by their names."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 64
    norm: str = "none"
    interleaved: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def arguments(self) -> dict[str, Tensor | None]:
        """The tensors, in the order of the operator's arguments."""
        generator = torch.Generator().manual_seed(0)
        tokens = len(SLOTS)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(self.dtype)

        width = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        wide = torch.full((tokens, width + 48), torch.nan, dtype=self.dtype)
        projected = wide[:, 16 : 16 + width]
        projected.copy_(random(tokens, width))
        # keys and values of tokens without a slot
        skipped = torch.tensor([slot < 0 for slot in SLOTS])
        projected[skipped, self.num_heads * self.head_dim :] = torch.nan
        angles = torch.randn(tokens, 1, self.rotary_dim // 2, generator=generator)
        cache = (NUM_BLOCKS, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        has_norm = self.norm != "none"
        return {
            "query": torch.full(
                (tokens, self.num_heads, self.head_dim), torch.nan, dtype=self.dtype
            ),
            "projected": projected,
            "query_norm": random(self.head_dim) if has_norm else None,
            "key_norm": random(self.head_dim) if has_norm else None,
            "cos": angles.cos().to(self.dtype),
            "sin": angles.sin().to(self.dtype),
            "key_cache": torch.full(cache, torch.nan, dtype=self.dtype),
            "value_cache": torch.full(cache, torch.nan, dtype=self.dtype),
            "slot_mapping": torch.tensor(SLOTS),
        }

    @property
    def options(self) -> dict[str, float | bool]:
        return {
            "eps": EPS,
            "norm_adds_one": self.norm == "rms_plus_one",
            "interleaved": self.interleaved,
        }


def expected(case: Case, given: dict[str, Tensor | None]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and caches of keys and values, in float64: number by number, by complex factors."""
    tokens = len(SLOTS)
    rows = exact(given["projected"]).view(tokens, -1, case.head_dim)
    first_value = case.num_heads + case.num_kv_heads
    query = rows[:, : case.num_heads]
    key = rows[:, case.num_heads : first_value]
    if case.norm != "none":
        one = float(case.norm == "rms_plus_one")
        query = _unit(query) * (exact(given["query_norm"]) + one)
        key = _unit(key) * (exact(given["key_norm"]) + one)
    factors = torch.complex(exact(given["cos"]), exact(given["sin"]))
    caches = torch.full((2, *exact(given["key_cache"]).shape), torch.nan, dtype=torch.float64)
    turned = _turned(key, factors, case)
    for token, slot in enumerate(SLOTS):
        if slot >= 0:
            caches[0, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = turned[token]
            caches[1, slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = rows[token, first_value:]
    return _turned(query, factors, case), caches[0], caches[1]


def exact(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.double()


def _unit(heads: Tensor) -> Tensor:
    return heads / (heads.square().mean(-1, keepdim=True) + EPS).sqrt()


def _turned(heads: Tensor, factors: Tensor, case: Case) -> Tensor:
    turned = heads.clone()
    for pair in range(case.rotary_dim // 2):
        one, other = pair, pair + case.rotary_dim // 2
        if case.interleaved:
            one, other = 2 * pair, 2 * pair + 1
        product = torch.complex(heads[..., one], heads[..., other]) * factors[..., pair]
        turned[..., one] = product.real
        turned[..., other] = product.imag
    return turned


CASES = {
    "halves": Case(),
    "equal heads": Case(num_heads=3, num_kv_heads=3),
    "more heads than one program has": Case(num_heads=24, num_kv_heads=9, head_dim=128),
    "one key-value head": Case(num_heads=5, num_kv_heads=1, head_dim=256, rotary_dim=256),
    "norms": Case(norm="rms"),
    "norms less 1": Case(norm="rms_plus_one", head_dim=256, rotary_dim=256),
    "neighbours": Case(interleaved=True),
    "neighbours and norms": Case(interleaved=True, norm="rms"),
    "part of a head": Case(head_dim=80, rotary_dim=32, norm="rms"),
    "neighbours in part of a head": Case(head_dim=128, rotary_dim=64, interleaved=True),
    "no power of two": Case(head_dim=96, rotary_dim=96, norm="rms_plus_one"),
    "no power of two in part": Case(head_dim=40, rotary_dim=24, norm="rms"),
    "one pair": Case(head_dim=3, rotary_dim=2, norm="rms"),
}
