"""Mixers: what layers with a recurrent state have in place of attention. No torch here.

A mixer combines the positions of a sequence. Every kind has a short causal convolution, and all but
one have a recurrent state beside it. A mixer's config says what memory, costs and ranks need to
know of it; `nanoserve.models.recurrent` has the modules.
"""

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

NO_LIMIT = 3.4e38
"""A step that none exceeds, as JSON has no infinity."""


class MixerMatrix(NamedTuple):
    """A matrix of a mixer; the output matrix, which belongs to the layer, is not among them."""

    name: str
    columns: int
    rows: tuple[int, ...]
    """Rows of each of its blocks."""
    is_rounded: bool = True
    """Whether quantization rounds it; otherwise its weights stay numbers."""
    is_fused: bool = False
    """Whether all blocks are one tensor of a checkpoint, and packed as one if no ranks divide
    them."""


class _Sizes(msgspec.Struct, frozen=True, tag=True):
    """The sizes of a mixer, of a whole layer or of one rank's part of it. The tag tells kinds apart
    where a config is written and read back."""

    @property
    def output_size(self) -> int:
        """Columns of the output matrix."""
        raise NotImplementedError

    @property
    def head_dim(self) -> int:
        """Columns of the output matrix that belong to a head; 0 where there are no heads."""
        return 0

    @property
    def most_parts(self) -> int:
        """The most ranks that can divide a layer; other numbers of ranks must divide it."""
        raise NotImplementedError

    @property
    def part_name(self) -> str:
        """The word for what ranks divide."""
        raise NotImplementedError

    @property
    def matrix_shape(self) -> tuple[int, ...] | None:
        """Shape of a sequence's recurrent state, which is float32; None if there is none."""
        raise NotImplementedError

    def matrices(self, hidden_size: int) -> Sequence[MixerMatrix]:
        """The matrices, in the order of their products."""
        raise NotImplementedError

    def scan_flops(self, tokens: int, pairs: int) -> float:
        """Operations on the state for tokens of a step. Pairs are those of a token and an earlier
        one of its chunk."""
        raise NotImplementedError

    @property
    def scan_numbers(self) -> int:
        """Numbers that the operator over the state reads and writes for a token."""
        raise NotImplementedError


class ShortConvolutionConfig(_Sizes, frozen=True):
    """A short convolution between two gates (LFM2, arXiv 2511.23404), which has no other state."""

    channels: int

    @property
    def output_size(self) -> int:
        return self.channels

    @property
    def most_parts(self) -> int:
        return self.channels

    @property
    def part_name(self) -> str:
        return "channels of a convolution"

    @property
    def matrix_shape(self) -> None:
        return None

    def matrices(self, hidden_size: int) -> Sequence[MixerMatrix]:
        """The inputs of the convolution, and the gates before and after it."""
        return (MixerMatrix("inputs", hidden_size, (self.channels,) * 3, is_fused=True),)

    def scan_flops(self, tokens: int, pairs: int) -> float:
        return 0.0

    @property
    def scan_numbers(self) -> int:
        return 0

    def part(self, degree: int) -> "ShortConvolutionConfig":
        return replace(self, channels=self.channels // degree)


class GatedDeltaNetConfig(_Sizes, frozen=True):
    """Gated DeltaNet (arXiv 2412.06464): each value head has a matrix of key_head_dim rows and
    value_head_dim columns. Neighbouring value heads share a key head."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int

    @property
    def key_size(self) -> int:
        """Numbers of the keys of all heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Numbers of the values of all heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def output_size(self) -> int:
        return self.value_size

    @property
    def head_dim(self) -> int:
        return self.value_head_dim

    @property
    def most_parts(self) -> int:
        return self.num_key_heads

    @property
    def part_name(self) -> str:
        return "key heads of linear attention"

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_value_heads, self.key_head_dim, self.value_head_dim

    def matrices(self, hidden_size: int) -> Sequence[MixerMatrix]:
        """Queries, keys, values, and a gate for the output; a decay and a rate of each head."""
        return (
            MixerMatrix("inputs", hidden_size, (self.channels, self.value_size)),
            MixerMatrix("rates", hidden_size, (2 * self.num_value_heads,), is_rounded=False),
        )

    def scan_flops(self, tokens: int, pairs: int) -> float:
        """Each token's key and query read the state, and a product of key and value is added."""
        numbers = self.key_head_dim * self.value_head_dim
        both = self.key_head_dim + self.value_head_dim
        return self.num_value_heads * (6.0 * numbers * tokens + 2.0 * both * pairs)

    @property
    def scan_numbers(self) -> int:
        return self.channels + self.value_size

    def part(self, degree: int) -> "GatedDeltaNetConfig":
        return replace(
            self,
            num_key_heads=self.num_key_heads // degree,
            num_value_heads=self.num_value_heads // degree,
        )


class Mamba2Config(_Sizes, frozen=True):
    """Mamba-2 (arXiv 2405.21060): each head has a matrix of state_size rows and head_dim columns,
    all of whose numbers decay alike. Neighbouring heads share a group's key and query, which the
    paper calls B and C."""

    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    time_step_limits: tuple[float, float] = (0.0, NO_LIMIT)
    """The least and the largest step; see `Mamba2` in nanoserve.models.mamba."""
    ranks_of_group: int = 1
    """Ranks that have heads of each group."""

    @property
    def inner_size(self) -> int:
        """Numbers of the values of all heads."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Numbers of the keys of all groups, and of their queries."""
        return self.num_groups * self.state_size

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.inner_size + 2 * self.group_size

    @property
    def output_size(self) -> int:
        return self.inner_size

    @property
    def most_parts(self) -> int:
        """Ranks divide groups, or the heads of a single group, which all of them have."""
        if self.num_groups == 1:
            return self.num_heads
        return self.num_groups

    @property
    def part_name(self) -> str:
        if self.num_groups == 1:
            return "heads of a state"
        return "groups of heads of a state"

    @property
    def matrix_shape(self) -> tuple[int, int, int]:
        return self.num_heads, self.state_size, self.head_dim

    def matrices(self, hidden_size: int) -> Sequence[MixerMatrix]:
        """Gates of the output, values, keys and queries, and a step of each head."""
        inner, group = self.inner_size, self.group_size
        rows = (inner, inner, group, group, self.num_heads)
        return (MixerMatrix("inputs", hidden_size, rows, is_fused=True),)

    def scan_flops(self, tokens: int, pairs: int) -> float:
        """A product of key and value is added to the state, and each token's query reads it."""
        numbers = self.state_size * self.head_dim
        both = self.state_size + self.head_dim
        return self.num_heads * (4.0 * numbers * tokens + 2.0 * both * pairs)

    @property
    def scan_numbers(self) -> int:
        return self.channels + self.inner_size

    def part(self, degree: int) -> "Mamba2Config":
        num_heads = self.num_heads // degree
        if self.num_groups == 1:
            return replace(self, num_heads=num_heads, ranks_of_group=degree)
        return replace(self, num_heads=num_heads, num_groups=self.num_groups // degree)


class MambaConfig(_Sizes, frozen=True):
    """Mamba (arXiv 2312.00752): each channel has state_size numbers, each with a decay of its own.
    A product with the convolved values makes keys and queries, which all channels share, and a
    vector of time_step_rank numbers, of which another matrix makes each channel's step."""

    channels: int
    state_size: int
    time_step_rank: int
    has_norms: bool = False
    """Whether that vector, keys and queries are normalized (Jamba)."""

    @property
    def output_size(self) -> int:
        return self.channels

    @property
    def most_parts(self) -> int:
        return self.channels

    @property
    def part_name(self) -> str:
        return "channels of a state"

    @property
    def selection_sizes(self) -> tuple[int, int, int]:
        """Rows of the matrix that makes steps, keys and queries."""
        return self.time_step_rank, self.state_size, self.state_size

    @property
    def matrix_shape(self) -> tuple[int, int]:
        return self.channels, self.state_size

    def matrices(self, hidden_size: int) -> Sequence[MixerMatrix]:
        """Values and gates; what is made of convolved values; and their steps."""
        return (
            MixerMatrix("inputs", hidden_size, (self.channels,) * 2, is_fused=True),
            MixerMatrix("selection", self.channels, self.selection_sizes, is_rounded=False),
            MixerMatrix("time_step", self.time_step_rank, (self.channels,), is_rounded=False),
        )

    def scan_flops(self, tokens: int, pairs: int) -> float:
        """Each number decays by an exponential of its own, takes a product, and is read."""
        return 7.0 * prod(self.matrix_shape) * tokens

    @property
    def scan_numbers(self) -> int:
        return 3 * self.channels + 2 * self.state_size

    def part(self, degree: int) -> "MambaConfig":
        return replace(self, channels=self.channels // degree)


MixerConfig = ShortConvolutionConfig | GatedDeltaNetConfig | Mamba2Config | MambaConfig
"""The sizes of any mixer."""
