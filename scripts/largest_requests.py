"""Measure how the largest legal request of one client delays other clients, for each field of a
request.

    nanoserve serve --port 8000 &
    python scripts/largest_requests.py http://127.0.0.1:8000

Three others ask all the time: one looks at /health (the event loop), one has a conversation
tokenized (the template and the tokenizing threads), and one reads a stream (the engine). The
longest wait of each is printed, in milliseconds, with the mean step of the engine. The aim is one
step and 250 ms. Run it on a machine that does nothing else.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODY_CHARACTERS = 1_000_000
WORDS = "a " * (BODY_CHARACTERS // 2)
TOKENS = list(range(300, 1324))
STOPS = [chr(65 + index) + "a" * 1022 + "b" for index in range(16)]
HELD = ["a" * 1023 + "b", *(chr(99 + index) + "a" * 1023 for index in range(15))]
"""Stop strings that are nearly met. A text of a's always ends with a beginning of the first, never
of the others."""
BIAS = {str(token): -1 for token in TOKENS}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 1, "frequency_penalty": 1}
ALL_FIELDS = {
    "stop": STOPS,
    "stop_token_ids": TOKENS,
    "logit_bias": BIAS,
    "frequency_penalty": 1,
    "min_tokens": 1,
}
HI = [{"role": "user", "content": "Hi"}]
PARTS = [{"type": "text", "text": "a"}] * (BODY_CHARACTERS // 30)
NUMBERS = {f"p{number}": {"type": "integer", "maximum": 1000 * number} for number in range(800)}
LARGE_SCHEMA = {
    "name": "s",
    "schema": {"type": "object", "properties": NUMBERS, "required": list(NUMBERS)},
}
SHORT = {"max_tokens": 4, "ignore_eos": True}
STRUCTURED = {"max_tokens": 16, "ignore_eos": False}
MANY = {"prompt": ["a"] * 128}
LONG = list(range(5, 1000))
COMPLETIONS: Mapping[str, dict[str, Any]] = {
    "nothing": {},
    "prompts x repeated stop_token_ids": {**MANY, "stop_token_ids": list(range(4096)) * 40},
    "prompts": MANY,
    "prompts x n": {**MANY, "n": 16},
    "prompts x n x stop": {**MANY, "n": 16, "stop": STOPS},
    "prompts x n x stop_token_ids": {**MANY, "n": 16, "stop_token_ids": TOKENS},
    "prompts x n x logit_bias": {**MANY, "n": 16, "logit_bias": BIAS},
    "prompts x n x logit_bias x penalties": {
        **MANY,
        "n": 16,
        "logit_bias": BIAS,
        **PENALTIES,
        "max_tokens": 16,
    },
    "prompts x n x stop, nearly met": {
        **MANY,
        "n": 16,
        "stop": HELD,
        "logit_bias": {"69": 100},
        "max_tokens": 64,
    },
    "prompts x n x all of these": {**MANY, "n": 16, **ALL_FIELDS},
    "prompts x n, streamed": {**MANY, "n": 16, "max_tokens": 16, "stream": True},
    "prompts x n x logprobs": {**MANY, "n": 16, "logprobs": 20, "max_tokens": 16},
    "long token prompts": {"prompt": [LONG] * 128},
    "long token prompts x n x penalties": {"prompt": [LONG] * 128, "n": 16, **PENALTIES},
    "echo with logprobs": {"prompt": LONG, "echo": True, "logprobs": 20},
    "long token prompts, echo with logprobs": {
        "prompt": [LONG] * 128,
        "echo": True,
        "logprobs": 20,
    },
    "long text prompts": {"prompt": ["a b" * 600] * 128},
    "a prompt too long": {"prompt": WORDS},
    "token ids too many": {"prompt": [5] * (BODY_CHARACTERS // 3)},
    "user, a megabyte": {"user": "a" * BODY_CHARACTERS},
    "model, a megabyte": {"model": "a" * BODY_CHARACTERS},
    "a field's name, a megabyte": {"x" * BODY_CHARACTERS: 1},
}
CHATS: Mapping[str, dict[str, Any]] = {
    "a message too long": {"messages": [{"role": "user", "content": WORDS}]},
    "4096 messages": {"messages": HI * 4096},
    "25,000 messages": {"messages": HI * 25_000},
    "parts of a message": {"messages": [{"role": "user", "content": PARTS}]},
    "tool_calls of a message": {
        "messages": [*HI, {"role": "assistant", "tool_calls": [0] * (BODY_CHARACTERS // 3)}]
    },
    "logprobs of a chat x n": {"n": 16, "logprobs": True, "top_logprobs": 20},
    "the first JSON schema": {**STRUCTURED, "response_format": {"type": "json_object"}},
    "json_schema x n": {
        **STRUCTURED,
        "n": 16,
        "response_format": {"type": "json_schema", "json_schema": LARGE_SCHEMA},
    },
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(
        (name, COMPLETION, {"prompt": "a", **SHORT, **fields})
        for name, fields in COMPLETIONS.items()
    ),
    *((name, CHAT, {"messages": HI, **SHORT, **fields}) for name, fields in CHATS.items()),
    ("/tokenize", "/tokenize", {"prompt": WORDS}),
    ("/detokenize", "/detokenize", {"tokens": [5] * 1024}),
]
"""Name, path and body of each."""


class Others:
    """Other clients of a server; the longest wait of each in seconds, until it is cleared."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=600)
        self.longest: dict[str, float] = {}
        asking: dict[str, Callable[[], object]] = {
            "health": lambda: self.client.get("/health"),
            "tokenize": lambda: self.client.post("/tokenize", json={"messages": HI}),
        }
        for item in asking.items():
            threading.Thread(target=self._ask, args=item, daemon=True).start()
        threading.Thread(target=self._read, daemon=True).start()

    def _note(self, name: str, began: float) -> None:
        self.longest[name] = max(self.longest.get(name, 0.0), time.perf_counter() - began)

    def _ask(self, name: str, ask: Callable[[], object]) -> None:
        while True:
            began = time.perf_counter()
            ask()
            self._note(name, began)
            time.sleep(0.02)

    def _read(self) -> None:
        body = {
            "prompt": "Once",
            "max_tokens": 1000,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
        while True:
            with self.client.stream("POST", COMPLETION, json=body) as answer:
                before = None  # the next stream may have to queue for its first token
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        if before is not None:
                            self._note("stream", before)
                        before = time.perf_counter()


def _steps(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("nanoserve:engine_steps_total")
    )


def main(url: str) -> None:
    """Print a line for each case."""
    others = Others(url)
    print("| request | status | seconds | step | /health | /tokenize | stream |")
    print("|---|---|---|---|---|---|---|")
    with httpx.Client(base_url=url, timeout=1800) as client:
        for name, path, body in CASES:
            time.sleep(1)
            others.longest.clear()
            content = json.dumps(body)
            steps, began = _steps(client), time.perf_counter()
            status = client.post(
                path, content=content, headers={"content-type": "application/json"}
            ).status_code
            seconds = time.perf_counter() - began
            step = seconds / max(1.0, _steps(client) - steps)
            waits = " | ".join(
                f"{1000 * others.longest.get(one, 0.0):.0f}"
                for one in ("health", "tokenize", "stream")
            )
            print(
                f"| {name} | {status} | {seconds:.1f} | {1000 * step:.0f} | {waits} |", flush=True
            )


if __name__ == "__main__":
    main(sys.argv[1])
