"""Many requests, good and bad, with clients that come and go: nothing leaks, nothing breaks,
nothing is mixed up.

In the suite there are few of them. NANOSERVE_SOAK_REQUESTS=5000 and NANOSERVE_FUZZ_REQUESTS=20000
make as many as a release should see; ``-s`` shows what came out.
"""

import asyncio
import os
import random
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest

from tests.server.conftest import MODEL
from tests.server.starting import Server, running, running_fake

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTROL = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
SOAK_REQUESTS = int(os.environ.get("NANOSERVE_SOAK_REQUESTS", "480"))
FUZZ_REQUESTS = int(os.environ.get("NANOSERVE_FUZZ_REQUESTS", "800"))
SOAK_BATCHES, FUZZ_BATCHES = 12, 2
ALLOWED_GROWTH = 5 << 20
"""Bytes from batch to batch, in the median after the first half, which is the warm-up. A leak adds
to every batch. What the allocator keeps grows once by much when more requests than before meet, and
that depends on the machine's load."""
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        -0.5,
        1.5,
        17,
        10**9,
        2**31,
        2**63,
        2**64,
        1e308,
        "",
        "a",
        "5",
        "\u202e",
        "a" * 2000,
    ),
    *(
        [],
        [1],
        [-1],
        [""],
        ["a"],
        [[1]],
        [[]],
        {},
        {"a": 1},
        {"5": 1},
        {"type": "text"},
        {"include_usage": True},
    ),
)
FIELDS = (
    *(
        "model",
        "stream",
        "stream_options",
        "user",
        "n",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
    ),
    *(
        "frequency_penalty",
        "repetition_penalty",
        "logit_bias",
        "seed",
        "stop",
        "stop_token_ids",
        "max_tokens",
    ),
    *(
        "min_tokens",
        "ignore_eos",
        "prompt",
        "messages",
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "echo",
    ),
    *(
        "suffix",
        "best_of",
        "tools",
        "tool_choice",
        "response_format",
        "chat_template",
        "cache_salt",
        "nonsense",
    ),
)


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Any fields with any values: most are refused, some are fine."""
    path = rng.choice([CHAT, COMPLETION, COMPLETION, "/tokenize"])
    body: dict[str, Any] = (
        {"prompt": "Once"} if path != CHAT else {"messages": [{"role": "user", "content": "Hi"}]}
    )
    if path != "/tokenize":
        body["max_tokens"] = rng.randint(1, 6)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        body[rng.choice(FIELDS)] = rng.choice(ODD)
    return path, body


class Footprint:
    """Resources that the server's processes hold at a moment."""

    def __init__(self, server: Server) -> None:
        processes = [server.process.pid, server.engine_process_id()]
        self.files = [len(os.listdir(f"/proc/{process}/fd")) for process in processes]
        self.threads = [len(os.listdir(f"/proc/{process}/task")) for process in processes]
        self.memory = [_resident_bytes(process) for process in processes]

    def __str__(self) -> str:
        memory = ", ".join(f"{size / 2**20:.1f} MiB" for size in self.memory)
        return f"front end and engine: {memory}; files {self.files}; threads {self.threads}"


def _resident_bytes(process: int) -> int:
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _fuzz(server: Server, rng: random.Random, count: int) -> Counter[int]:
    statuses: Counter[int] = Counter()
    todo = iter([_request(rng) for _ in range(count)])

    async def client(http: httpx.AsyncClient) -> None:
        for path, body in todo:
            answer = await http.post(server.url + path, json=body)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (path, body, answer.text)
            assert answer.status_code == 200 or set(answer.json()["error"]) == {
                "message",
                "type",
                "param",
                "code",
            }

    async with httpx.AsyncClient(timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(8)))
    return statuses


@pytest.mark.slow
def test_any_request_is_answered_or_refused_and_harms_no_one() -> None:
    began, statuses = time.monotonic(), Counter[int]()
    with running_fake("--kv-cache-memory", "8192") as server:
        control = server.post(COMPLETION, CONTROL).json()["choices"]
        for batch in range(FUZZ_BATCHES):
            came = asyncio.run(_fuzz(server, random.Random(batch), FUZZ_REQUESTS // FUZZ_BATCHES))
            assert came[200] > 20 and came[400] > 20
            statuses += came
            assert server.get("/health").status_code == 200
            assert server.post(COMPLETION, CONTROL).json()["choices"] == control
            server.wait_idle()
        assert server.metric("nanoserve:engine_restarts_total") == 0
    print(f"\nfuzz: {dict(statuses)} in {time.monotonic() - began:.0f} s")


async def _come_and_go(server: Server, rng: random.Random, count: int) -> Counter[str]:
    todo = iter(range(count))
    ends: Counter[str] = Counter()

    async def client(http: httpx.AsyncClient) -> None:
        for _ in todo:
            tokens = rng.randint(1, 60)
            body = {
                "prompt": [rng.randint(10, 4000) for _ in range(rng.choice([1, 10, 100, 400]))],
                "max_tokens": tokens,
                "ignore_eos": True,
                "n": rng.choice([1, 1, 1, 2]),
                "stream": rng.random() < 0.7,
            }
            patience = rng.choice([None, None, 0.02, 0.2, 1.0])
            try:
                answer = await http.post(
                    server.url + COMPLETION, json=body, timeout=patience or 120
                )
            except httpx.TimeoutException:
                assert patience is not None, "a client that waits is answered"
                ends["disconnected"] += 1
                continue
            assert answer.status_code == 200, answer.text
            ends["answered"] += 1
            if not body["stream"]:
                assert answer.json()["usage"]["completion_tokens"] == tokens * body["n"]

    async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None)) as http:
        await asyncio.gather(*(client(http) for _ in range(32)))
    return ends


@pytest.mark.slow
def test_clients_that_come_and_go_leave_no_trace() -> None:
    began, ends, footprints = time.monotonic(), Counter[str](), []
    with running(*MODEL, "--max-model-len", "512", "--kv-cache-memory", "8MiB") as server:
        control = server.post(COMPLETION, CONTROL).json()["choices"]
        for batch in range(SOAK_BATCHES):
            ends += asyncio.run(
                _come_and_go(server, random.Random(batch), SOAK_REQUESTS // SOAK_BATCHES)
            )
            server.wait_idle()  # every block is back
            assert server.post(COMPLETION, CONTROL).json()["choices"] == control
            footprints.append(Footprint(server))
        assert server.metric("nanoserve:engine_restarts_total") == 0, server.log
        preemptions = server.metric("vllm:num_preemptions_total")
    warm, last = footprints[SOAK_BATCHES // 2 - 1], footprints[-1]
    print(
        f"\nsoak: {dict(ends)}, {preemptions:.0f} preemptions, in {time.monotonic() - began:.0f} s"
    )
    for footprint in footprints:
        print(footprint)
    assert last.threads == warm.threads
    for before, after in zip(warm.files, last.files, strict=True):
        assert after <= before + 2
    later = footprints[SOAK_BATCHES // 2 - 1 :]
    for process in range(2):
        growth = median(
            after.memory[process] - before.memory[process] for before, after in pairwise(later)
        )
        assert growth < ALLOWED_GROWTH, "memory grows with the requests served"
