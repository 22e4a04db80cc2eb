"""Log probabilities under the model's raw distribution, as answers carry them."""

from collections.abc import Sequence

from torch import Tensor

from nanoserve.request import TokenLogprob
from nanoserve.runtime.selection import top_tokens

ELEMENTS_PER_CHUNK = 1 << 24


def rows_per_chunk(vocab_size: int) -> int:
    """How many positions' logits to hold at once, so that a long prompt of a large vocabulary still fits: 64 MiB."""
    return max(1, ELEMENTS_PER_CHUNK // vocab_size)


def token_logprobs(logits: Tensor, tokens: Tensor, tops: Sequence[int]) -> list[TokenLogprob]:
    """What the raw logits, float32 [N, V] without NaN, say of tokens, int64 [N].

    tops: how many of the likeliest tokens to name for each row, 0 for none.
    """
    normalizer = logits.logsumexp(dim=1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    ranks = (logits > chosen).sum(1) + 1
    best = top_tokens(logits, max(tops)) if max(tops) else tokens[:, None][:, :0]
    best_logprobs = (logits.gather(1, best) - normalizer).tolist()
    columns = zip(
        tokens.tolist(),
        (chosen - normalizer)[:, 0].tolist(),
        ranks.tolist(),
        best.tolist(),
        best_logprobs,
        tops,
        strict=True,
    )
    return [
        TokenLogprob(token, logprob, rank, tuple(zip(ids[:top], values[:top], strict=True)))
        for token, logprob, rank, ids, values, top in columns
    ]
