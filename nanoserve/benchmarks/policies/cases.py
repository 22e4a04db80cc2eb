"""Cases of `bench hybrid`: output lengths as in APEX's figure 7, with less and less KV memory. No torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nanoserve.errors import UsageError
from nanoserve.measures.workloads import RequestShape


class KvCase(NamedTuple):
    """Equal requests, the KV blocks that the device has for them, and their share of those that hold everything."""

    shape: RequestShape
    share: float
    num_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCases:
    """The grid of cases: every length of answers with every share of the KV memory."""

    input_tokens: int
    outputs: Sequence[int]  # the lengths of the answers, ascending
    requests: int  # number of requests in each case, which arrive all at once
    shares: Sequence[float]  # shares of the blocks that would hold everything, ascending
    block_size: int

    @property
    def name(self) -> str:
        return f"{self.requests} requests of {self.input_tokens}+{','.join(map(str, self.outputs))}"

    @property
    def longest(self) -> RequestShape:
        return RequestShape(self.input_tokens, max(self.outputs))

    def sequence_blocks(self, shape: RequestShape) -> int:
        """Blocks of a sequence at its end."""
        return -(-shape.total_tokens // self.block_size)

    def host_blocks(self, shape: RequestShape) -> int:
        """Blocks of host memory that hold every sequence to its end."""
        return self.requests * self.sequence_blocks(shape)

    def device_blocks(self, shape: RequestShape) -> int:
        """Blocks with which no KV has to leave the device: they hold every sequence to its end. Policies keep more free
        than is ever filled: a block for each sequence to grow into, and room for a prompt on its way to host memory."""
        return self.host_blocks(shape) + self.requests - (-self.input_tokens // self.block_size)

    def cases(self) -> Iterator[KvCase]:
        """Yield the cases by output length, then by share. Raises UsageError for a share that holds no request."""
        for output in self.outputs:
            shape = RequestShape(self.input_tokens, output)
            everything, needed = self.device_blocks(shape), self.sequence_blocks(shape)
            for share in self.shares:
                blocks = int(share * everything)
                if blocks < needed:
                    raise UsageError(
                        f"--kv-limits {share:g}: {blocks} of {everything} KV blocks do not hold one request of "
                        f"{shape.input_tokens}+{shape.output_tokens}; give at least {needed / everything:.3f}"
                    )
                yield KvCase(shape, share, blocks)


def parse_shares(text: str) -> tuple[float, ...]:
    """Shares above 0 and up to 1, separated by commas: "0.3,0.6,1"; ascending, each once. Raises UsageError."""
    try:
        shares = set(map(float, text.split(",")))
    except ValueError:
        shares = {math.nan}
    if not all(0 < share <= 1 for share in shares):
        raise UsageError(f"--kv-limits takes shares above 0 and up to 1 such as 0.25,0.5,1, not {text!r:.60}")
    return tuple(sorted(shares))
