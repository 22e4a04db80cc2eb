"""Log probabilities in the two forms that OpenAI gives them."""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from nanoserve.request import TokenLogprob
from nanoserve.text.tokenizer import Tokenizer

_REMEMBERED_TEXTS = 65536


class TokenTexts:
    """How single tokens read."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.text = lru_cache(_REMEMBERED_TEXTS)(self._text)

    def _text(self, token: int) -> str:
        """The token's text in the midst of others: at the beginning some tokenizers swallow its blank."""
        once = self._tokenizer.decode([token], skip_special_tokens=False)
        twice = self._tokenizer.decode([token, token], skip_special_tokens=False)
        return twice[len(once) :]


def chat_logprobs(logprobs: Iterable[TokenLogprob], texts: TokenTexts) -> dict[str, Any]:
    """The form of chat completions: one object per token."""
    content = [
        _entry(one.token, one.logprob, texts)
        | {"top_logprobs": [_entry(token, logprob, texts) for token, logprob in one.top]}
        for one in logprobs
    ]
    return {"content": content}


def _entry(token: int, logprob: float, texts: TokenTexts) -> dict[str, Any]:
    text = texts.text(token)
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def completion_logprobs(logprobs: Iterable[TokenLogprob], texts: TokenTexts, offset: int) -> dict[str, Any]:
    """The form of completions: parallel lists. ``offset`` is where the first token's text begins in the answer."""
    tokens: list[str] = []
    offsets: list[int] = []
    chances: list[float] = []
    tops: list[dict[str, float]] = []
    for one in logprobs:
        text = texts.text(one.token)
        tokens.append(text)
        offsets.append(offset)
        chances.append(one.logprob)
        # The sampled token is in it as well, which makes it one longer where that is not among the likeliest.
        tops.append({texts.text(token): logprob for token, logprob in (*one.top, (one.token, one.logprob))})
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": chances, "top_logprobs": tops, "text_offset": offsets}
