"""Answers that requests must give, worked out alone and without any scheduler."""

from nanoserve.request import Request
from nanoserve.scheduler.plan import Begin
from tests.fakes.memory_checking_executor import NextToken, next_token


def expected_tokens(
    request: Request, *, index: int = 0, max_model_len: int, model: NextToken = next_token
) -> tuple[list[int], str]:
    """One sample of one request with nothing else in the world: its output tokens and its finish
    reason."""
    params = request.params
    late = () if params.ignore_eos else request.end_tokens
    begin = Begin(0, request.prompt, len(request.prompt), index, request.seed, params, late)
    tokens = list(request.prompt)
    output: list[int] = []
    while True:
        token = model(tokens, begin)
        tokens.append(token)
        output.append(token)
        may_stop = len(output) > params.min_tokens
        if may_stop and (
            token in params.stop_token_ids
            or (token in request.end_tokens and not params.ignore_eos)
        ):
            return output, "stop"
        if len(output) == params.max_tokens or len(tokens) == max_model_len:
            return output, "length"
