"""An LLM without a model: it says back what it was told, a word per step, so that commands are
tested in milliseconds.

``python -m tests.commands.fake_llm ARGUMENTS`` is the command ``nanoserve`` with this LLM behind
it.

What it is told may steer it: "slowly" makes it go on for ever with a pause between words, "fail"
makes the engine give up, "perish" ends all its workers for good in the midst of a batch, and a
question that holds "<think>" is answered as it is, reasoning and all.
"""

import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanoserve.commands.engine_options import EngineOptions
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import ModelError, NanoserveError, RuntimeFailure, UsageError
from nanoserve.models.hub import ResolvedModel
from nanoserve.record.counters import EngineStatus
from nanoserve.request import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    SequenceUpdate,
)
from nanoserve.text.answers.forms import AnswerParser, answer_form
from nanoserve.text.answers.settings import ThinkingSwitch
from nanoserve.text.tokenizer import PromptTooLong

PAUSE = 0.02


def words(text: str) -> list[str]:
    """The fake's tokens: a word with the blanks behind it."""
    return re.findall(r"\S+\s*|\s+", text)


class FakeTokenizer:
    """A token is a word; a conversation is its lines "role: content"."""

    has_chat_template = True
    notice: str | None = None

    thinking_switch = ThinkingSwitch({"enable_thinking": True}, {"enable_thinking": False})

    def encode_chat(
        self,
        messages: list[dict[str, str]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Any = None,
    ) -> list[int]:
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + ("assistant: " if add_generation_prompt else ""))

    def answer_parser(self, prompt: Sequence[int]) -> AnswerParser:
        return AnswerParser(answer_form(""), {})

    def encode(
        self, text: str, *, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        tokens = [len(word) for word in words(text)]
        if limit is not None and len(tokens) > 2 * limit:
            raise PromptTooLong(f"the prompt has more than {limit} tokens")
        return tokens


class _FakeEngine:
    """Two engines that are used as one."""

    def __init__(self) -> None:
        self.engines = types.SimpleNamespace(failure=None), types.SimpleNamespace(failure=None)
        self.failure: str | None = None

    def fail(self, failure: str, *, together: bool) -> None:
        self.engines[0].failure = failure
        if together:
            self.failure = failure


def _prepare(progress: Any = None) -> None:
    if progress is not None:
        progress("compiling layers", 0, 1)
        progress("compiling layers", 1, 1)


class FakeLLM:
    """The part of LLM that commands use. ``prompts`` and ``params`` record what was asked."""

    def __init__(
        self,
        found: Any = None,
        *,
        max_model_len: int | None = None,
        expected: Any = None,
        **settings: Any,
    ) -> None:
        model = getattr(found, "name", found)
        if model == "missing":
            raise ModelError("no model at missing: name a directory")
        if model == "interrupted":
            try:
                raise KeyboardInterrupt
            except KeyboardInterrupt:
                raise ImportError("cannot load a library") from None
        if model == "slow":
            print("loading", flush=True)
            time.sleep(30)
        if model == "endless":
            threading.Event().wait()
        if model == "loading":
            for done in range(10_000):
                settings["progress"]("loading", done, 10_000)
                time.sleep(PAUSE)
        if model == "broken":
            raise ZeroDivisionError("a bug\nof two lines")
        if settings.get("progress") is not None:
            for done in range(3):
                settings["progress"]("loading", done, 2)
        self.settings = settings
        self.built = types.SimpleNamespace(
            engine=_FakeEngine(),
            config=EngineConfig(
                **{name: value for name, value in settings.items() if name != "progress"}
            ),
            max_model_len=max_model_len or 200,
            choice=None,
            speeds=None,
            start_preparing=lambda: None,
            prepare=_prepare,
        )
        self.model_name = model or "storyteller"
        self.tokenizer = FakeTokenizer()
        self.prompts: list[Any] = []
        self.params: list[SamplingParams] = []
        self.template_arguments: list[Any] = []
        self.aborted = self.steps = 0
        self.progress: tuple[int, int] | None = None  # of the prompt
        # called before an answer, and before each of its steps
        self.before_answer: Callable[[], None] = lambda: None
        self.before_step: Callable[[int], None] = lambda step: None
        self.asked_for_drafts = self.closed = False

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True

    @property
    def status(self) -> EngineStatus:
        """The layout changes every ten steps of a batch; a quarter of host memory is in use."""
        turns = self.steps // 10
        return EngineStatus(
            layouts=(turns % 2,),
            running=1,
            total_blocks=10,
            free_host_blocks=3,
            total_host_blocks=4,
            steps=self.steps,
            transitions=turns,
        )

    def prompt_progress(self) -> tuple[int, int] | None:
        return self.progress

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.8, top_p=0.95)

    def stream(
        self,
        prompt: Any,
        params: SamplingParams,
        template_arguments: Any = None,
        *,
        drafts: bool = False,
    ) -> Iterator[RequestOutput]:
        text, ids = self._tokenize(prompt)
        if len(ids) >= self.built.max_model_len:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the context {self.built.max_model_len}"
            )
        self.prompts.append(prompt)
        self.params.append(params)
        self.template_arguments.append(template_arguments)
        self.asked_for_drafts = drafts
        return self._stream(text, ids, params)

    def generate_as_completed(
        self,
        items: Iterable[tuple[Any, SamplingParams]],
        *,
        on_step: Callable[[Sequence[SequenceUpdate]], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | NanoserveError]]:
        held: list[tuple[int, RequestOutput]] = []
        for position, (prompt, params) in enumerate(items):
            try:
                deltas = []
                for delta in self.stream(prompt, params):
                    deltas.append(delta)
                    self.steps += 1
                    if on_step is not None:
                        on_step([])
            except NanoserveError as error:
                yield position, error
                continue
            if "perish" in str(prompt):  # the only engine, or one of two
                failure = "the workers died 3 times"
                self.built.engine.fail(failure, together="half" not in str(prompt))
                sample = replace(deltas[-1].outputs[0], finish_reason="error", error=failure)
                yield position, replace(_whole(deltas, 1), outputs=(sample,))
                continue
            held.append((position, _whole(deltas, params.n)))
            if len(held) == 2:  # finishing order is not the order of the input
                yield held.pop()
        yield from held

    def _tokenize(self, prompt: Any) -> tuple[str, tuple[int, ...]]:
        if isinstance(prompt, str):
            return prompt, tuple(self.tokenizer.encode(prompt))
        if not all(isinstance(message, dict) and "content" in message for message in prompt):
            raise UsageError("messages are objects with role and content")
        return prompt[-1]["content"], tuple(self.tokenizer.encode_chat(prompt))

    def _stream(
        self, text: str, ids: tuple[int, ...], params: SamplingParams
    ) -> Iterator[RequestOutput]:
        if "fail" in text:
            raise RuntimeFailure("the executor died")
        slow = "slowly" in text
        answer = words(text if "<think>" in text else f"You said: {text}")
        room = min(params.max_tokens or 10**9, self.built.max_model_len - len(ids))
        finished = False
        try:
            self.before_answer()
            step = 0
            while not finished:
                self.before_step(step)
                time.sleep(PAUSE if slow else 0)
                word = answer[step % len(answer)]
                step += 1
                ends = not slow and step == len(answer)
                finished = ends or step == room
                reason = "stop" if ends else "length" if finished else None
                yield _delta(ids, word, step, reason)
        finally:
            self.aborted += not finished


def _delta(ids: tuple[int, ...], text: str, step: int, reason: str | None) -> RequestOutput:
    latest = 0.5 + 0.1 * (step - 1)
    metrics = RequestMetrics(0.0, 0.25, 0.5, latest, latest if reason else None, step)
    sample = CompletionOutput(0, text, (step,), None, reason, None, metrics)
    return RequestOutput("fake", None, ids, (sample,), reason is not None, cached_tokens=1)


def _whole(deltas: list[RequestOutput], n: int) -> RequestOutput:
    last = deltas[-1].outputs[0]
    text = "".join(delta.outputs[0].text for delta in deltas)
    tokens = tuple(range(len(deltas)))
    samples = tuple(
        CompletionOutput(i, text, tokens, None, last.finish_reason, None, last.metrics)
        for i in reversed(range(n))
    )
    return RequestOutput(
        "fake", None, deltas[-1].prompt_token_ids, samples, finished=True, cached_tokens=1
    )


def find_model(options: EngineOptions) -> ResolvedModel:
    """Every name is that of a model."""
    EngineConfig(**options.settings())
    return ResolvedModel(options.model or "storyteller", None, Path())


def module() -> types.ModuleType:
    """A stand-in for nanoserve.llm."""
    stand_in = types.ModuleType("nanoserve.llm")
    stand_in.LLM = FakeLLM
    return stand_in


if __name__ == "__main__":
    from nanoserve.commands.main import run

    EngineOptions.find_model = find_model  # type: ignore[method-assign]  # the fake has no files
    sys.modules["nanoserve.llm"] = module()
    run()
