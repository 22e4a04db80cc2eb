"""Faults of processes, and their remains. The engine is the fake one but where it says
otherwise."""

import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

import nanoserve
from nanoserve.commands.main import main
from nanoserve.server.engine_client import EngineClient
from nanoserve.server.messages import Stop
from nanoserve.utils.sockets import connect
from tests.server.conftest import MODEL
from tests.server.fake_engine import BROKEN, POISON_TOKEN, VOCAB_SIZE, WORKER_POISON_TOKEN
from tests.server.fake_serve import PROGRAM
from tests.server.starting import (
    NO_TLS,
    PATIENCE_SECONDS,
    ROOT,
    Server,
    alive,
    answers,
    process_state,
    running,
    running_fake,
    shared_memory,
    wait_until,
)
from tests.server.test_engine_process import RUBBISH

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
BUNDLED = Path(nanoserve.__file__).parent / "assets" / "storyteller"
COMPILERS = ("g++", "c++", "clang++")
LOOPS = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
DOUBLES = (
    "{% set ns = namespace(x='a' * 1000) %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% "
    "endfor %}"
)
BREAKING = {
    "refuse": "{{ raise_exception('roles must alternate') }}",
    "loop": LOOPS,
    "double": DOUBLES,
    "fail": "{{ 1 + [] }}",
}
"""Text of a template for a message that holds a word."""
PADDING = "[PAD]"
SLOW_BODY = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
LONG = {"prompt": "Once upon a time", "max_tokens": 300, "ignore_eos": True, "temperature": 0}


class Reader(threading.Thread):
    """Reads a stream's text; ``text`` grows as it comes."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        super().__init__()
        self._server = server
        self._body = body | {"stream": True}
        self.data = ""
        self.start()

    def run(self) -> None:
        url = self._server.url + COMPLETION
        with (
            suppress(httpx.RemoteProtocolError),  # the front end was killed
            httpx.stream(
                "POST", url, json=self._body, headers=self._server.headers, timeout=240, **NO_TLS
            ) as answer,
        ):
            for piece in answer.iter_text():
                self.data += piece

    @property
    def text(self) -> str:
        events = [
            line.removeprefix("data: ")
            for line in self.data.split("\n\n")
            if line and "[DONE]" not in line
        ]
        objects = [json.loads(event) for event in events]
        assert not any("error" in event for event in objects), objects[-1]
        return "".join(choice["text"] for event in objects for choice in event["choices"])

    def wait_begun(self) -> None:
        wait_until(lambda: self.data.count("data:") > 20)


def _model_with_template(directory: Path, template: str) -> Path:
    shutil.copytree(BUNDLED, directory)
    path = directory / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return directory


def whole_text(server: Server, body: dict[str, Any]) -> str:
    """Return an answer in one piece."""
    answer = server.post(COMPLETION, body)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the model of `fake`, with a template that some messages break, and with a token
    of padding for which the model has no embedding."""
    deeds = BREAKING | {"pad this": PADDING}
    branches = "".join(
        f"{{% if '{word}' in m.content %}}{do}{{% endif %}}" for word, do in deeds.items()
    )
    template = "{% for m in messages %}{{ m.content }}" + branches + "{% endfor %}"
    directory = _model_with_template(tmp_path_factory.mktemp("fake") / "model", template)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    padding = {"id": VOCAB_SIZE, "content": PADDING, "special": False}
    tokenizer["added_tokens"].append(tokenizer["added_tokens"][0] | padding)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


@pytest.fixture(scope="module")
def fake(model: Path) -> Iterator[Server]:
    """For all that leaves a front end alive."""
    with running_fake("--kv-cache-memory", "8192", "--model", str(model)) as server:
        yield server


@pytest.fixture(scope="module")
def whole(fake: Server) -> str:
    """The text of LONG, which every fake engine answers alike."""
    return whole_text(fake, LONG)


def test_a_prompt_with_a_token_that_the_model_lacks_is_refused(fake: Server) -> None:
    """The tokenizer of the model of `fake` has one token more than the engine's embedding."""
    lacks = f"token id {VOCAB_SIZE} is not in the vocabulary of {VOCAB_SIZE}"
    for path, asked, param in (
        ("/v1/completions", {"prompt": f"Once{PADDING}"}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "pad this"}]},
            "messages",
        ),
    ):
        answer = fake.post(path, {**asked, "max_tokens": 1})
        assert answer.status_code == 400, answer.text
        assert (answer.json()["error"]["message"], answer.json()["error"]["param"]) == (
            f"{param}: {lacks}",
            param,
        )


# ------------------------------------------------------------------------------------- the front
# end dies


@pytest.mark.parametrize(
    "state", [pytest.param("idle", marks=pytest.mark.slow), "busy", "with a stopped engine"]
)
def test_nothing_is_left_of_a_front_end_that_was_killed(state: str) -> None:
    server = Server("--port", "0", module="tests.server.fake_serve")
    server.wait_ready()
    readers = [Reader(server, LONG)] if state == "busy" else []
    for reader in readers:
        reader.wait_begun()
    processes, engine = server.descendants(), server.engine_process_id()
    assert len(server.sockets()) == 1, "that is all that is not a file"
    assert not any(shared_memory(process) for process in [server.process.pid, *processes])
    if state == "with a stopped engine":
        if os.getsid(1) == os.getsid(0):
            pytest.skip(
                "the system wakes stopped processes only when the one that adopts them is of "
                "another session"
            )
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: process_state(engine) == "T")
    server.process.kill()
    server.process.wait()
    wait_until(lambda: not any(alive(process) for process in processes))
    assert server.left_behind() == []
    for reader in readers:
        reader.join()
    shutil.rmtree(server.directory)


@pytest.mark.parametrize(
    "moment",
    [0.6, 2.5, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (0.2, 1.0, 1.6))],
)
def test_nothing_is_left_of_a_start_that_was_ended(moment: float) -> None:
    def end_by(number: signal.Signals) -> None:
        server = Server("--port", "0", *MODEL)  # the real engine, whose start takes a while
        time.sleep(moment)
        processes = server.descendants()
        server.process.send_signal(number)
        server.process.wait(PATIENCE_SECONDS)
        wait_until(lambda: not any(alive(process) for process in processes))
        wait_until(lambda: not server.left_behind())
        server.end()
        assert "nanoserve/server" not in server.log, "no traceback but of Python's own start"
        shutil.rmtree(server.directory)

    with ThreadPoolExecutor() as threads:
        list(threads.map(end_by, (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)))


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="no C++ compiler")
def test_a_compiler_ends_with_the_engine_it_works_for(tmp_path: Path) -> None:
    model = [word for word in MODEL if word != "--eager"]
    with running(*model, XDG_CACHE_HOME=str(tmp_path)) as server:
        body = LONG | {"max_tokens": 150}
        expected = whole_text(server, body)  # answered while the libraries are being built

        wait_until(lambda: len(_builders(server)) > 0)
        first = _builders(server)
        reader = Reader(server, body)
        reader.wait_begun()
        os.kill(server.engine_process_id(), signal.SIGKILL)
        wait_until(lambda: not any(alive(builder) for builder in first))
        reader.join()
        assert reader.text == expected, "the real engine, too, goes on with the same text"
        server.wait_idle()
        wait_until(lambda: len(_builders(server)) > 0)
        processes = server.descendants()
        server.process.kill()
        wait_until(lambda: not any(alive(process) for process in processes))


def _builders(server: Server) -> list[int]:
    """Processes that compile: they let everyone else go first."""
    found = []
    for process in server.descendants():
        with suppress(ProcessLookupError):
            if os.getpriority(os.PRIO_PROCESS, process) == 19:
                found.append(process)
    return found


# -------------------------------------------------------------------------------------- the engine
# dies


def test_streams_go_on_when_the_engine_is_killed(fake: Server, whole: str) -> None:
    bodies = [LONG, LONG | {"n": 2, "temperature": 1, "seed": 4, "max_tokens": 250}]
    sampled = [choice["text"] for choice in fake.post(COMPLETION, bodies[1]).json()["choices"]]
    restarts = fake.metric("nanoserve:engine_restarts_total")
    readers = [Reader(fake, body) for body in bodies]
    for reader in readers:
        reader.wait_begun()
    before = fake.log.count("the engine was killed by SIGKILL")
    os.kill(fake.engine_process_id(), signal.SIGKILL)
    wait_until(lambda: fake.log.count("the engine was killed by SIGKILL") > before)
    during = fake.post(COMPLETION, LONG)
    for reader in readers:
        reader.join()
    assert readers[0].text == whole
    assert sorted(readers[1].text) == sorted("".join(sampled))
    assert during.json()["choices"][0]["text"] == whole, (
        "a request of the time between engines is answered too"
    )
    assert fake.metric("nanoserve:engine_restarts_total") == restarts + 1
    assert "the engine was killed by SIGKILL" in fake.log
    fake.wait_idle()


def test_a_stopped_engine_is_treated_like_a_dead_one(fake: Server, whole: str) -> None:
    reader = Reader(fake, LONG)
    reader.wait_begun()
    process = fake.engine_process_id()
    os.kill(process, signal.SIGSTOP)
    reader.join()
    assert reader.text == whole
    assert not alive(process)


def test_a_request_that_kills_engines_is_given_up_and_the_others_go_on(
    fake: Server, whole: str
) -> None:
    answer = fake.post(COMPLETION, {"prompt": [POISON_TOKEN, 5], "max_tokens": 3})
    assert answer.status_code == 500 and "died too often" in answer.json()["error"]["message"]
    assert whole_text(fake, LONG) == whole
    assert fake.get("/health").status_code == 200


def test_when_restarts_keep_failing_the_server_stays_up_and_says_so(
    fake: Server, whole: str, model: Path
) -> None:
    reader = Reader(fake, LONG | {"max_tokens": 480})
    reader.wait_begun()
    (model / BROKEN).touch()
    try:
        os.kill(fake.engine_process_id(), signal.SIGKILL)
        wait_until(lambda: fake.get("/health").status_code == 503)
        refused = fake.post(COMPLETION, LONG)
        assert refused.status_code == 503 and "retry-after" in refused.headers
        assert "the weights are broken" in refused.json()["error"]["message"]
        assert fake.get("/ready").status_code == 503
        reader.join()
        assert '"error"' in reader.data and reader.data.endswith("data: [DONE]\n\n")
    finally:
        (model / BROKEN).unlink()  # other tests share the server
    wait_until(lambda: fake.get("/ready").status_code == 200)
    assert whole_text(fake, LONG) == whole


# ------------------------------------------------------------------------------------- its workers
# die


def test_streams_go_on_when_workers_die(fake: Server, whole: str) -> None:
    restarts = fake.metric("nanoserve:engine_restarts_total")
    losses = fake.metric("nanoserve:worker_losses_total")
    readers = [Reader(fake, body) for body in (LONG, LONG | {"n": 2})]
    for reader in readers:
        reader.wait_begun()
    answer = fake.post(COMPLETION, {"prompt": [WORKER_POISON_TOKEN, 2], "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    for reader in readers:
        reader.join()
    assert readers[0].text == whole and len(readers[1].text) == 2 * len(whole)
    assert fake.metric("nanoserve:worker_losses_total") == losses + 2
    assert fake.metric("nanoserve:engine_restarts_total") == restarts
    fake.wait_idle()


@pytest.mark.slow
def test_when_no_workers_come_any_more_the_server_stays_up_and_says_so() -> None:
    with running_fake(RETRY_SECONDS="5") as server:
        whole = whole_text(server, LONG)
        reader = Reader(server, LONG | {"max_tokens": 480})
        reader.wait_begun()
        died = server.post(COMPLETION, {"prompt": [WORKER_POISON_TOKEN, 9], "max_tokens": 3})
        refused = server.post(COMPLETION, LONG)
        for answer in (died, refused, server.get("/health"), server.get("/ready")):
            assert answer.status_code == 503, answer.text
            assert (
                "the workers died 3 times; the last time worker 1 was killed"
                in answer.json()["error"]["message"]
            )
        reader.join()
        # It was there at two deaths, as the request that kills was. The older of the two is the
        # first to run alone.
        assert '"finish_reason":"length"' in reader.data and reader.data.endswith(
            "data: [DONE]\n\n"
        )
        wait_until(lambda: server.get("/ready").status_code == 200)
        assert whole_text(server, LONG) == whole
        assert server.get("/health").status_code == 200


# ------------------------------------------------------------------------------------- templates


def test_messages_that_break_the_template_are_refused(fake: Server, whole: str) -> None:
    reader = Reader(fake, LONG)
    for word in BREAKING:
        refused = fake.post(CHAT, {"messages": [{"role": "user", "content": word}]})
        assert refused.status_code == 400 and refused.json()["error"]["message"], refused.text
        plain = fake.post(CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1})
        assert plain.status_code == 200
    assert (
        "roles must alternate"
        in fake.post(CHAT, {"messages": [{"role": "user", "content": "refuse"}]}).text
    )
    reader.join()
    assert reader.text == whole


# ------------------------------------------------------------------------------ someone else at the
# socket


def test_nobody_else_is_heard_at_the_socket(fake: Server, whole: str) -> None:
    before = fake.metric("nanoserve:dropped_messages_total")
    sockets = fake.sockets()
    assert len(sockets) == 1
    reader = Reader(fake, LONG)
    with zmq.Context() as context:
        for name in sockets:
            with socket.socket(socket.AF_UNIX) as raw, suppress(BrokenPipeError):
                raw.connect(name.replace("@", "\0"))
                raw.sendall(pickle.dumps({"not": "even ZeroMQ"}) * 1000)
            for key in (None, zmq.curve_keypair()[0].decode()):
                push = context.socket(zmq.PAIR)
                if key is None:
                    push.connect(f"ipc://{name}")
                else:
                    connect(push, f"ipc://{name}", key)
                push.send(msgspec.msgpack.encode(Stop("nobody's")))
                for rubbish in RUBBISH:
                    push.send(rubbish)
                push.close(linger=500)
    reader.join()
    assert reader.text == whole
    assert whole_text(fake, LONG) == whole, "the engine tells what it dropped with its next report"
    assert fake.metric("nanoserve:dropped_messages_total") == before, "it has not even come"


# ------------------------------------------------------------------------------------------ signals


def test_sigterm_lets_running_requests_end(whole: str) -> None:
    with running_fake() as server:
        reader = Reader(server, LONG)
        reader.wait_begun()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: any("stopping" in line for line in server.lines))
        refused = server.post(COMPLETION, LONG)
        assert refused.status_code == 503 and server.get("/ready").status_code == 503
        assert server.process.wait(PATIENCE_SECONDS) == 0
        reader.join()
        assert reader.text == whole


@pytest.mark.parametrize("second", [True, False])
def test_a_second_signal_or_the_end_of_the_time_does_not_wait(second: bool) -> None:  # noqa: FBT001
    arguments = () if second else ("--drain-timeout", "0.5")
    with running_fake(*arguments) as server:
        reader = Reader(server, LONG | {"max_tokens": 480})
        reader.wait_begun()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: any("stopping" in line for line in server.lines))
        # until the last moment, which must not change the exit code
        while second and server.process.poll() is None:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert server.process.wait(PATIENCE_SECONDS) == 0
        reader.join()
        assert "stopping" in reader.data and "error" in reader.data


def test_neither_a_stopped_template_process_nor_a_slow_client_delays_the_end() -> None:
    server = Server("--port", "0", module="tests.server.fake_serve")
    server.wait_ready()
    (template,) = [
        process for process in server.descendants() if process != server.engine_process_id()
    ]
    os.kill(template, signal.SIGSTOP)
    url = httpx.URL(server.url)
    with ThreadPoolExecutor() as threads, socket.create_connection((url.host, url.port)) as slow:
        slow.sendall(SLOW_BODY)
        chat = threads.submit(
            server.post, CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
        )
        wait_until(lambda: _has_unread(template))
        server.process.send_signal(signal.SIGTERM)
        refused = chat.result()
    assert (
        refused.status_code == 503
        and "chat template was ended" in refused.json()["error"]["message"]
    )
    assert server.end() == 0 and not alive(template)
    assert "Traceback" not in server.log
    shutil.rmtree(server.directory)


def _has_unread(process: int) -> bool:
    """Whether something waits to be read on a process's stdin, which is a pipe."""
    with open(f"/proc/{process}/fd/0", "rb") as pipe:
        return bool(select.select([pipe], [], [], 0)[0])


# ----------------------------------------------------------------------------------------- the
# queue


@pytest.fixture(scope="module")
def small() -> Iterator[Server]:
    """Two requests may run and three may wait. Of its 40 blocks, LONG needs 20."""
    with running_fake(
        "--max-num-seqs", "2", "--max-queue", "3", "--kv-cache-memory", "640"
    ) as server:
        yield server


def test_more_than_may_wait_are_turned_away(small: Server) -> None:
    running_now = [Reader(small, LONG | {"seed": number}) for number in range(2)]
    wait_until(lambda: small.metric("vllm:num_requests_running") == 2)
    waiting = [Reader(small, LONG | {"seed": number, "max_tokens": 9}) for number in range(3)]
    wait_until(lambda: small.metric("vllm:num_requests_waiting") == 3)
    refused = small.post(COMPLETION, LONG)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["code"] == "queue_full"
    streamed = small.post(COMPLETION, LONG | {"stream": True})
    assert streamed.status_code == 429
    assert small.post(COMPLETION, LONG | {"prompt": ["a"] * 4}).status_code == 429
    for reader in running_now + waiting:
        reader.join()
    (whole,), (beginning,) = (
        {reader.text for reader in readers} for readers in (running_now, waiting)
    )
    assert beginning and whole.startswith(beginning)
    assert small.metric("vllm:admission_rejections_total") == 3
    small.wait_idle()


def test_an_answer_that_takes_too_long_is_ended() -> None:
    with running_fake("--request-timeout", "0.3") as server:
        late = server.post(COMPLETION, LONG)
        assert late.status_code == 504 and late.json()["error"]["code"] == "timeout"
        assert '"code":"timeout"' in server.post(COMPLETION, LONG | {"stream": True}).text
        server.wait_idle()


def test_streams_that_do_not_fit_together_take_turns(small: Server) -> None:
    # each needs 27 blocks
    bodies = [LONG | {"prompt": [10 + number] * 300, "max_tokens": 120} for number in range(3)]
    alone = [whole_text(small, body) for body in bodies]
    preemptions = small.metric("vllm:num_preemptions_total")
    readers = [Reader(small, body) for body in bodies]
    for reader in readers:
        reader.join()
    assert [reader.text for reader in readers] == alone
    assert small.metric("vllm:num_preemptions_total") > preemptions
    small.wait_idle()


# ------------------------------------------------------------------------------------------- keys


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    """It has two keys, of which tests may choose one as `keyed.key`."""
    server = Server(
        "--port", "0", "--api-key", "sécret", "--api-key", "other", module="tests.server.fake_serve"
    )
    try:
        server.key = "other"
        server.wait_ready()
        yield server
    finally:
        assert server.end() == 0
        shutil.rmtree(server.directory)


def test_a_key_is_asked_for_everywhere_but_at_health(keyed: Server) -> None:
    paths = (
        "/v1/models",
        "/ready",
        "/metrics",
        "/version",
        "//v1/models",
        "/%2e/health",
        "/nothing",
        "/HEALTH",
    )
    with httpx.Client(base_url=keyed.url, **NO_TLS) as client:
        for path in paths:
            for key in (
                b"",
                b"Bearer",
                b"Bearer wrong",
                b"Bearer \xff\xfe",
                b"Basic other",
                b"other",
            ):
                answer = client.get(keyed.url + path, headers={"authorization": key})
                assert answer.status_code == 401, (path, key)
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for host in ("a/?x=", "evil.example"):
            assert client.get("/v1/models", headers={"host": host}).status_code == 401
        assert client.post(COMPLETION, json=LONG).status_code == 401
        assert client.get("/health").status_code == 200
        for key in ("sécret".encode(), b"other"):
            assert (
                client.get("/v1/models", headers={"authorization": b"Bearer " + key}).status_code
                == 200
            )


def test_prefixes_are_shared_only_with_the_same_key(keyed: Server) -> None:
    cached = []
    for key in ("sécret", "other", "sécret"):
        headers = {"authorization": f"Bearer {key}".encode()}
        usage = keyed.post(
            COMPLETION, {"prompt": [7] * 100, "max_tokens": 1}, headers=headers
        ).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 96]


# ------------------------------------------------------------------------------------------ the
# command


@pytest.fixture
def own_signals() -> Iterator[None]:
    """A command in this process does not change how the signals of this process are handled."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_signals")
def test_mistakes_on_the_command_line_are_one_line(
    tmp_path: Path, fake: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(EngineClient.__init__.__kwdefaults__, "program", PROGRAM)
    port = str(httpx.URL(fake.url).port)
    broken = tmp_path / "model"
    shutil.copytree(BUNDLED, broken)
    (broken / BROKEN).touch()
    for words, code, said in (
        (("--host", "0.0.0.0"), 2, "can be reached from outside"),
        (("--api-key", ""), 2, "is empty"),
        (("--port", port), 1, "choose another --port"),
        (("--host", "256.1.1.1", "--insecure"), 1, "cannot listen on 256.1.1.1"),
        (("--port", "0", "--max-body-size", "much"), 2, "is not a size"),
        (("--port", "0", "--model", "/no/such/place"), 3, "no such directory"),
        (("--port", "0", "--model", str(broken)), 3, "the weights are broken"),
        (
            ("--port", "0", "--model", str(_model_with_template(tmp_path / "loops", LOOPS))),
            3,
            "template",
        ),
    ):
        capfd.readouterr()
        assert main(["serve", *words]) == code, words
        told = capfd.readouterr().err
        lines = [line for line in told.splitlines() if "listening on" not in line]
        assert len(lines) == 1 and said in lines[0], told


def test_a_log_that_is_full_is_no_reason_to_stop() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "tests.server.fake_serve", "--port", str(port)]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(words, cwd=ROOT, stderr=full)
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/ready", {}))
        process.terminate()
        assert process.wait(PATIENCE_SECONDS) == 0
    finally:
        process.kill()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no full device to write to")
def test_a_trace_that_cannot_be_written_is_told_at_once_and_by_the_exit_code() -> None:
    server = Server("--port", "0", *MODEL, "--record", "/dev/full")
    server.wait_ready()
    assert server.post(COMPLETION, {"prompt": "Once", "max_tokens": 2}).status_code == 200
    reason = "cannot write /dev/full: No space left on device"
    wait_until(lambda: f"the trace ends here: {reason}" in server.log)
    assert server.end() == 1
    assert (
        server.log.count(reason) == 2
        and server.lines[-1] == f"nanoserve: the trace is not complete: {reason}"
    )
    shutil.rmtree(server.directory)
