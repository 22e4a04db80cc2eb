"""Admission: what can never run is refused when it comes, and not when it is stuck."""

from nanoserve.errors import UsageError
from nanoserve.request import Request


def check_admissible(request: Request, *, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """That a request finds room where sequences may have so many tokens, and KV so many blocks.

    Raises:
        UsageError: if it can never run to its end.
    """
    length = len(request.prompt)
    if length == 0:
        raise UsageError("the prompt is empty: give at least one token")
    if length >= max_model_len:
        raise UsageError(
            f"the prompt has {length} tokens, but the context holds {max_model_len} with at least one "
            "for the answer; shorten the prompt or raise --max-model-len"
        )
    if length + request.params.min_tokens > max_model_len:
        raise UsageError(
            f"min_tokens {request.params.min_tokens} can never be reached: after a prompt of {length} tokens the "
            f"context of {max_model_len} has room for {max_model_len - length}; lower it"
        )
    longest = min(max_model_len, length + (request.params.max_tokens or max_model_len))
    # The last token is never attended to, so its KV is never written.
    if (needed := -(-(longest - 1) // block_size)) > num_blocks:
        raise UsageError(
            f"the request may grow to {longest} tokens, which take {needed} KV blocks, but there are "
            f"{num_blocks}; lower max_tokens or raise --kv-cache-memory"
        )
