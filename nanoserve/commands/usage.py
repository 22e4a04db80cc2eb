"""An answer and what it cost: token counts and times, as one line for people and as JSON for programs."""

import json
from dataclasses import dataclass

from nanoserve.request import RequestMetrics, RequestOutput


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens and seconds of one answer; a rate or time is None where it was never reached."""

    prompt_tokens: int | None  # None where a server has not told (yet)
    cached_tokens: int | None  # prompt tokens whose KV came from the prefix cache; None where a server does not tell
    completion_tokens: int
    metrics: RequestMetrics  # times of the first sample

    @classmethod
    def of(cls, output: RequestOutput, completion_tokens: int) -> "AnswerUsage":
        """The usage of a whole output, or of the last delta of a stream, with the tokens of all samples or deltas."""
        return cls(len(output.prompt_token_ids), output.cached_tokens, completion_tokens, output.outputs[0].metrics)

    @property
    def total_tokens(self) -> int | None:
        """Prompt and answer together: the context in use."""
        return None if self.prompt_tokens is None else self.prompt_tokens + self.completion_tokens

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed (not cached) per second, from the first plan to the first token."""
        start, end = self.metrics.first_scheduled_time, self.metrics.first_token_time
        if start is None or end is None or end <= start or self.prompt_tokens is None:
            return None
        return (self.prompt_tokens - (self.cached_tokens or 0)) / (end - start)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first."""
        pace = self.metrics.time_per_output_token
        return 1 / pace if pace else None

    def counts(self) -> dict[str, int | None]:
        """The OpenAI field names, and the cached tokens."""
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")
        return {name: getattr(self, name) for name in names}

    def timings(self) -> dict[str, float | None]:
        """Seconds and tokens per second."""
        values = {
            "queue_s": self.metrics.queue_time,
            "ttft_s": self.metrics.time_to_first_token,
            "tpot_s": self.metrics.time_per_output_token,
            "total_s": self.metrics.latency,
            "prefill_tokens_per_s": self.prefill_rate,
            "decode_tokens_per_s": self.decode_rate,
        }
        return {name: None if value is None else round(value, 6) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer, or what is new of one."""

    text: str
    reasoning: str  # what was told apart already; while the answer goes on, ``text`` may hold more of it between tags
    usage: AnswerUsage  # until now
    finish_reason: str | None  # None while it goes on, and when it was interrupted

    def line(self, context: int | None) -> str:
        """One line (t/s: tokens per second); ``context`` is the most tokens of prompt and answer together, if known."""
        usage, parts = self.usage, []
        if usage.prompt_tokens is not None:
            cached = "" if usage.cached_tokens is None else f" ({usage.cached_tokens} cached)"
            parts.append(f"{usage.prompt_tokens} prompt{cached}")
        parts.append(f"{usage.completion_tokens} new" + (", interrupted" if self.finish_reason is None else ""))
        if (first := usage.metrics.time_to_first_token) is not None:
            parts.append(f"TTFT {first:.2f} s")
        if (rate := usage.prefill_rate) is not None:
            parts.append(f"prefill {rate:,.0f} t/s")
        if (rate := usage.decode_rate) is not None:
            parts.append(f"decode {rate:,.1f} t/s")
        if usage.total_tokens is not None:
            parts.append(f"context {usage.total_tokens}" + ("" if context is None else f"/{context}"))
        return " · ".join(parts)

    def json(self, model: str) -> str:
        """The object that ``--json`` prints."""
        reasoning = {"reasoning": self.reasoning} if self.reasoning else {}
        end = {"finish_reason": self.finish_reason, "model": model}
        cost = {"usage": self.usage.counts(), "timings": self.usage.timings()}
        return json.dumps({"text": self.text} | reasoning | end | cost, ensure_ascii=False)
