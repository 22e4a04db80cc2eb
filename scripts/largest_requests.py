"""What the largest legal request of one client costs another: for each field, how long others wait meanwhile.

    nanoserve serve --port 8000 &
    python scripts/largest_requests.py http://127.0.0.1:8000

Three others ask all the time: one looks at /health (the event loop), one has a conversation tokenized (the template
and the tokenizing threads), and one reads a stream (the engine). The longest wait of each is printed, in milliseconds,
with the mean step of the engine. The aim is one step and 250 ms. Run it on a machine that does nothing else.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BODY_CHARACTERS = 1_000_000
TOKENS = list(range(300, 1324))
STOPS = [chr(65 + index) + "a" * 1022 + "b" for index in range(16)]
BIAS = {str(token): -1 for token in TOKENS}
PROMPTS = ["a"] * 128
HI = [{"role": "user", "content": "Hi"}]
NUMBERS = {f"p{number}": {"type": "integer", "maximum": 1000 * number} for number in range(800)}
LARGE_SCHEMA = {"type": "object", "properties": NUMBERS, "required": list(NUMBERS)}


def _cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name, path and body of each."""
    yield "nothing", COMPLETION, {"prompt": "a"}
    yield "prompts x repeated stop_token_ids", COMPLETION, {"prompt": PROMPTS, "stop_token_ids": list(range(4096)) * 40}
    yield "prompts", COMPLETION, {"prompt": PROMPTS}
    yield "prompts x n", COMPLETION, {"prompt": PROMPTS, "n": 16}
    yield "prompts x n x stop", COMPLETION, {"prompt": PROMPTS, "n": 16, "stop": STOPS}
    yield "prompts x n x stop_token_ids", COMPLETION, {"prompt": PROMPTS, "n": 16, "stop_token_ids": TOKENS}
    yield "prompts x n x logit_bias", COMPLETION, {"prompt": PROMPTS, "n": 16, "logit_bias": BIAS}
    everything = {"stop": STOPS, "stop_token_ids": TOKENS, "logit_bias": BIAS, "frequency_penalty": 1, "min_tokens": 1}
    yield "prompts x n x all of these", COMPLETION, {"prompt": PROMPTS, "n": 16, **everything}
    yield "prompts x n x logprobs", COMPLETION, {"prompt": PROMPTS, "n": 16, "logprobs": 20, "max_tokens": 16}
    yield "long token prompts", COMPLETION, {"prompt": [list(range(5, 1000))] * 128}
    yield "long text prompts", COMPLETION, {"prompt": ["a b" * 600] * 128}
    yield "a prompt too long", COMPLETION, {"prompt": "a " * (BODY_CHARACTERS // 2)}
    yield "token ids too many", COMPLETION, {"prompt": [5] * (BODY_CHARACTERS // 3)}
    yield "a message too long", CHAT, {"messages": [{"role": "user", "content": "a " * (BODY_CHARACTERS // 2)}]}
    yield "4096 messages", CHAT, {"messages": HI * 4096}
    yield "25,000 messages", CHAT, {"messages": HI * 25_000}
    parts = [{"type": "text", "text": "a"}] * (BODY_CHARACTERS // 30)
    yield "parts of a message", CHAT, {"messages": [{"role": "user", "content": parts}]}
    call = [{"role": "assistant", "tool_calls": [0] * (BODY_CHARACTERS // 3)}]
    yield "tool_calls of a message", CHAT, {"messages": [*HI, *call]}
    yield "logprobs of a chat x n", CHAT, {"messages": HI, "n": 16, "logprobs": True, "top_logprobs": 20}
    yield "the first JSON schema", CHAT, {"messages": HI, "response_format": {"type": "json_object"}}
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": LARGE_SCHEMA}}
    yield "json_schema x n", CHAT, {"messages": HI, "n": 16, "response_format": schema}
    for name, value in (("user", "a" * BODY_CHARACTERS), ("model", "a" * BODY_CHARACTERS), ("x" * BODY_CHARACTERS, 1)):
        yield f"{name:.20}, a megabyte", COMPLETION, {"prompt": "a", name: value}
    yield "/tokenize", "/tokenize", {"prompt": "a " * (BODY_CHARACTERS // 2)}
    yield "/detokenize", "/detokenize", {"tokens": [5] * 1024}


class Others:
    """Other clients of a server; the longest wait of each since ``reset``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.longest: dict[str, float] = {}
        asking: dict[str, Callable[[httpx.Client], object]] = {
            "health": lambda client: client.get("/health"),
            "tokenize": lambda client: client.post("/tokenize", json={"messages": HI}),
        }
        self._threads = [threading.Thread(target=self._ask, args=item) for item in asking.items()]
        self._threads.append(threading.Thread(target=self._read))
        for thread in self._threads:
            thread.start()

    def reset(self) -> None:
        self.longest = dict.fromkeys(("health", "tokenize", "stream"), 0.0)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _note(self, name: str, seconds: float) -> None:
        self.longest[name] = max(self.longest.get(name, 0.0), seconds)

    def _ask(self, name: str, ask: Callable[[httpx.Client], object]) -> None:
        with httpx.Client(base_url=self._url, timeout=600) as client:
            while not self._stop.wait(0.02):
                began = time.perf_counter()
                ask(client)
                self._note(name, time.perf_counter() - began)

    def _read(self) -> None:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": True, "temperature": 0}
        while not self._stop.is_set():
            with httpx.stream("POST", self._url + COMPLETION, json=body, timeout=600) as answer:
                before = None  # the next stream may have to queue for its first token
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        now = time.perf_counter()
                        if before is not None:
                            self._note("stream", now - before)
                        before = now
                    if self._stop.is_set():
                        return


def _steps(client: httpx.Client) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("nanoserve:engine_steps_total"))


def main(url: str) -> None:
    """Print a line for each case."""
    others = Others(url)
    print("| request | status | seconds | step | /health | /tokenize | stream |")
    print("|---|---|---|---|---|---|---|")
    with httpx.Client(base_url=url, timeout=1800) as client:
        for name, path, body in _cases():
            time.sleep(1)
            others.reset()
            fields = {"max_tokens": 4, "ignore_eos": True} if path in (CHAT, COMPLETION) else {}
            if "response_format" in body:
                fields = {"max_tokens": 16}
            content = json.dumps(fields | body)
            steps, began = _steps(client), time.perf_counter()
            status = client.post(path, content=content, headers={"content-type": "application/json"}).status_code
            seconds = time.perf_counter() - began
            step = seconds / max(1.0, _steps(client) - steps)
            waits = " | ".join(f"{1000 * others.longest[one]:.0f}" for one in ("health", "tokenize", "stream"))
            print(f"| {name} | {status} | {seconds:.1f} | {1000 * step:.0f} | {waits} |", flush=True)
    others.end()


if __name__ == "__main__":
    main(sys.argv[1])
