"""Many requests, good and bad, with clients that come and go: nothing leaks, nothing breaks, nothing is mixed up."""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.starting import Server, running_fake

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
CONTROL = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}
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
    *([], [1], [-1], [""], ["a"], [[1]], [[]], {}, {"a": 1}, {"5": 1}, {"type": "text"}, {"include_usage": True}),
)
FIELDS = (
    *("model", "stream", "stream_options", "user", "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "max_tokens"),
    *("min_tokens", "ignore_eos", "prompt", "messages", "logprobs", "top_logprobs", "max_completion_tokens", "echo"),
    *("suffix", "best_of", "tools", "tool_choice", "response_format", "chat_template", "cache_salt", "nonsense"),
)


def _request(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Any fields with any values: most are refused, some are fine."""
    path = rng.choice([CHAT, COMPLETION, COMPLETION, "/tokenize"])
    body: dict[str, Any] = {"prompt": "Once"} if path != CHAT else {"messages": [{"role": "user", "content": "Hi"}]}
    if path != "/tokenize":
        body["max_tokens"] = rng.randint(1, 6)
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        body[rng.choice(FIELDS)] = rng.choice(ODD)
    return path, body


def _files(process: int) -> int:
    return len(os.listdir(f"/proc/{process}/fd"))


def _memory(process: int) -> int:
    """Resident bytes."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


async def _fuzz(server: Server, rng: random.Random, count: int) -> dict[int, int]:
    statuses: dict[int, int] = {}
    todo = iter([_request(rng) for _ in range(count)])

    async def client(http: httpx.AsyncClient) -> None:
        for path, body in todo:
            answer = await http.post(server.url + path, json=body)
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code < 500, (path, body, answer.text)
            assert answer.status_code == 200 or set(answer.json()["error"]) == {"message", "type", "param", "code"}

    async with httpx.AsyncClient(timeout=120) as http:
        await asyncio.gather(*(client(http) for _ in range(8)))
    return statuses


@pytest.mark.slow
def test_any_request_is_answered_or_refused_and_harms_no_one() -> None:
    with running_fake("--kv-cache-memory", "8192") as server:
        control = server.post(COMPLETION, CONTROL).json()["choices"]
        for batch in range(4):
            statuses = asyncio.run(_fuzz(server, random.Random(batch), 500))
            assert statuses[200] > 50 and statuses[400] > 50
            assert server.get("/health").status_code == 200
            assert server.post(COMPLETION, CONTROL).json()["choices"] == control
            server.wait_idle()
        assert server.metric("nanoserve:engine_restarts_total") == 0


async def _come_and_go(server: Server, rng: random.Random, count: int) -> None:
    todo = iter(range(count))

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
            patience = rng.choice([None, None, 0.02, 0.2])
            try:
                answer = await http.post(server.url + COMPLETION, json=body, timeout=patience or 120)
            except httpx.TimeoutException:
                continue
            assert answer.status_code == 200, answer.text
            if not body["stream"]:
                assert answer.json()["usage"]["completion_tokens"] == tokens * body["n"]

    async with httpx.AsyncClient() as http:
        await asyncio.gather(*(client(http) for _ in range(32)))


@pytest.mark.slow
def test_clients_that_come_and_go_leave_no_trace() -> None:
    with running_fake("--kv-cache-memory", "8192") as server:
        processes = [server.process.pid, server.engine_process_id()]
        asyncio.run(_come_and_go(server, random.Random(0), 600))
        server.wait_idle()
        files, memory = [[look(process) for process in processes] for look in (_files, _memory)]
        for batch in range(1, 3):
            asyncio.run(_come_and_go(server, random.Random(batch), 600))
            server.wait_idle()
        server.get("/health")
        for process, open_files, before in zip(processes, files, memory, strict=True):
            assert _files(process) <= open_files + 2
            assert _memory(process) < before + (24 << 20), "memory grows with the requests served"
        assert server.metric("nanoserve:engine_restarts_total") == 0
