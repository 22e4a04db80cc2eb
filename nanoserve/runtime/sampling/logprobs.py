"""Log probabilities under the model's raw distribution, as answers carry them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from nanoserve.request import TokenLogprob
from nanoserve.runtime.sampling.sampler import top_tokens

ELEMENTS_PER_CHUNK = 1 << 24


def rows_per_chunk(vocab_size: int) -> int:
    """How many positions' logits to hold at once, so that a long prompt of a large vocabulary still fits: 64 MiB."""
    return max(1, ELEMENTS_PER_CHUNK // vocab_size)


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """What raw logits say of N tokens, as tensors that may still be on the device."""

    tokens: Tensor
    """int64 [N]."""
    logprobs: Tensor
    """float32 [N]; of logits that are not numbers, anything."""
    ranks: Tensor
    """int64 [N]."""
    best: Tensor
    """int64 [N, K], the likeliest tokens."""
    best_logprobs: Tensor
    """float32 [N, K]."""

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor, most: int) -> "LogprobColumns":
        """The columns of logits, float32 [N, V], with the `most` likeliest tokens of each row; waits for nothing."""
        normalizer = logits.logsumexp(dim=1, keepdim=True)
        chosen = logits.gather(1, tokens[:, None])
        best = top_tokens(logits, most) if most else tokens[:, None][:, :0]
        return cls(
            tokens=tokens,
            logprobs=(chosen - normalizer)[:, 0],
            ranks=(logits > chosen).sum(1) + 1,
            best=best,
            best_logprobs=logits.gather(1, best) - normalizer,
        )

    def through(self, move: Callable[[Tensor], Tensor]) -> "LogprobColumns":
        """The same columns, each moved."""
        return LogprobColumns(
            move(self.tokens), move(self.logprobs), move(self.ranks), move(self.best), move(self.best_logprobs)
        )

    def rows(self, tops: Sequence[int]) -> Iterator[TokenLogprob]:
        """One by one, on the host. tops: how many of the likeliest tokens to name for each."""
        columns = zip(
            self.tokens.tolist(),
            self.logprobs.tolist(),
            self.ranks.tolist(),
            self.best.tolist(),
            self.best_logprobs.tolist(),
            tops,
            strict=True,
        )
        for token, logprob, rank, ids, values, top in columns:
            yield TokenLogprob(token, logprob, rank, tuple(zip(ids[:top], values[:top], strict=True)))
