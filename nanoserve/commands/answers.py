"""A model that answers in this process, and what answers cost."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from threading import Thread
from typing import TYPE_CHECKING, Any

import nanoserve
from nanoserve.commands.engine_options import sampling_params
from nanoserve.errors import RuntimeFailure
from nanoserve.request import RequestMetrics, RequestOutput, SamplingParams
from nanoserve.utils.waiting import Waiting

if TYPE_CHECKING:
    from nanoserve.text.answers.forms import AnswerParser

Conversation = Sequence[Mapping[str, str]]
Settings = Mapping[str, Any]
_LEAVING_SECONDS = 0.3  # longest wait for a model that is being loaded when it is closed


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """Tokens and seconds of one answer; a rate or time is None where it was never reached."""

    prompt_tokens: int | None  # None where a server has not told (yet)
    # prompt tokens whose KV came from the prefix cache; None where a server does not tell
    cached_tokens: int | None
    completion_tokens: int
    metrics: RequestMetrics  # times of the first sample
    # in which the tokens came; None where each is a step's only one, or nobody can tell
    steps: int | None = None

    @classmethod
    def of(
        cls, output: RequestOutput, completion_tokens: int, steps: int | None = None
    ) -> "AnswerUsage":
        """The usage of a whole output, or of the last delta of a stream, with the tokens of all
        samples or deltas."""
        metrics = output.outputs[0].metrics
        return cls(
            len(output.prompt_token_ids), output.cached_tokens, completion_tokens, metrics, steps
        )

    @property
    def total_tokens(self) -> int | None:
        """Prompt and answer together: the context in use."""
        if self.prompt_tokens is None:
            return None
        return self.prompt_tokens + self.completion_tokens

    @property
    def prefill_rate(self) -> float | None:
        """Prompt tokens computed (not cached) per second, from the first plan to the first
        token."""
        start, end = self.metrics.first_scheduled_time, self.metrics.first_token_time
        if start is None or end is None or end <= start or self.prompt_tokens is None:
            return None
        return (self.prompt_tokens - (self.cached_tokens or 0)) / (end - start)

    @property
    def decode_rate(self) -> float | None:
        """Tokens per second after the first."""
        pace = self.metrics.time_per_output_token
        if not pace:
            return None
        return 1 / pace

    @property
    def tokens_per_step(self) -> float | None:
        if not self.steps:
            return None
        return self.completion_tokens / self.steps

    def counts(self) -> dict[str, int | None]:
        names = ("prompt_tokens", "cached_tokens", "completion_tokens", "total_tokens")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """An answer, or its latest piece."""

    text: str
    reasoning: (
        # told apart from the text already; while the answer goes on, ``text`` may hold more of it
        # between tags
        str
    )
    usage: AnswerUsage  # until now
    finish_reason: str | None  # None while it goes on, and when it was interrupted
    marks: tuple[tuple[int, int], ...] = ()  # see `CompletionOutput`
    draft: bool = False  # see `RequestOutput`

    def line(self, waited: float | None) -> str:
        """The figures in one short line; ``waited`` are the seconds from Enter to the first
        token."""
        figures: list[tuple[str, Any]] = []
        if self.finish_reason is None:
            figures.append(("interrupted", ""))
        tokens = self.usage.completion_tokens
        figures += [
            ("1 token" if tokens == 1 else "{:,} tokens", tokens),
            ("{:,.1f} tokens/s", self.usage.decode_rate),
            ("the first after {:.2f} s", waited),
        ]
        return _listed(" · ", figures)

    def details(self, waited: float | None, context: int | None) -> str:
        """All figures, in lines; ``context`` is the most tokens of prompt and answer together, if
        known."""
        usage, most = self.usage, ""
        if context is not None:
            most = f" of {context:,}"
        parts: dict[str, list[tuple[str, Any]]] = {
            "prompt": [
                ("{:,} tokens", usage.prompt_tokens),
                ("{:,} of them cached", usage.cached_tokens),
                ("{:,.0f} tokens/s", usage.prefill_rate),
            ],
            "answer": [
                ("{:,} tokens", usage.completion_tokens),
                ("{:,.1f} tokens/s", usage.decode_rate),
                ("{:.2f} tokens a step", usage.tokens_per_step),
            ],
            "first token": [
                ("{:.2f} s after Enter", waited),
                ("{:.2f} s in the engine", usage.metrics.time_to_first_token),
            ],
            "context": [("{:,}" + most + " tokens", usage.total_tokens)],
        }
        listed = {name: _listed(", ", figures) for name, figures in parts.items()}
        return "\n".join(f"{name:<12} {text}" for name, text in listed.items() if text)

    def json(self, model: str) -> str:
        """The object that ``--json`` prints."""
        metrics = self.usage.metrics
        timings = {
            "queue_s": metrics.queue_time,
            "ttft_s": metrics.time_to_first_token,
            "tpot_s": metrics.time_per_output_token,
            "total_s": metrics.latency,
            "prefill_tokens_per_s": self.usage.prefill_rate,
            "decode_tokens_per_s": self.usage.decode_rate,
        }
        for name, value in timings.items():
            if value is not None:
                timings[name] = round(value, 6)
        answer: dict[str, Any] = {"text": self.text}
        if self.reasoning:
            answer["reasoning"] = self.reasoning
        answer |= {"finish_reason": self.finish_reason, "model": model}
        answer |= {"usage": self.usage.counts(), "timings": timings}
        return json.dumps(answer, ensure_ascii=False)


def _listed(separator: str, figures: Sequence[tuple[str, Any]]) -> str:
    """The figures that are known, each in its text."""
    return separator.join(text.format(figure) for text, figure in figures if figure is not None)


Answers = Generator[ChatAnswer, None, None]
"""Pieces of an answer, each with its new text; closing the generator ends the work on the
answer."""


class ContextFull(RuntimeFailure):
    """The conversation does not fit into the context; only a server of which no context is known
    finds out so late."""


class LocalModel:
    """An LLM in this process, opened in a thread: Ctrl-C does not wait until it is open.

    ``open_llm`` opens it, with a function for the progress. The seeds of answers are drawn from the
    user's ``seed``. ``notify`` gets what the LLM has chosen, and its notice, once it is open.
    ``drafts`` says whether answers have the drafts of text diffusion among their pieces.
    """

    def __init__(
        self,
        name: str,
        open_llm: "Callable[[Callable[[str, int, int], None]], nanoserve.LLM]",
        notify: Callable[[str], None],
        seed: int | None,
        *,
        drafts: bool = False,
    ) -> None:
        self.name, self.seed, self._open, self._notify = name, seed, open_llm, notify
        self._drafts = drafts
        # None leaves it to the model's chat template whether it reasons
        self.thinking: bool | None = None
        self._opening: Future[nanoserve.LLM] | None = None
        self._stage = Waiting("loading")
        self._is_closed = False

    def start(
        self,
        failed: Callable[[BaseException], None] = lambda error: None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Begin to open the LLM, and then to compile what makes answers faster. Starting again does
        nothing. The thread calls ``before`` first, as a second thread would take more of the time
        in which keys are read; and ``failed``, if the LLM cannot be opened."""
        if self._opening is not None:
            return
        opening: Future[nanoserve.LLM] = Future()
        self._opening = opening

        def tell_failure(_: object) -> None:
            error = opening.exception()
            if error is not None:
                failed(error)

        opening.add_done_callback(tell_failure)
        # A daemon, as nothing can end it in the midst of an import: see `nanoserve.commands.main`.
        Thread(target=self._open_ahead, args=(opening, before), daemon=True).start()

    def _open_ahead(self, opening: "Future[nanoserve.LLM]", before: Callable[[], object]) -> None:
        try:
            before()
            llm = self._open(self._note)
            llm.built.start_preparing()
        except BaseException as error:  # the thread that waits for it raises it again
            opening.set_exception(error)
        else:
            opening.set_result(llm)

    def _note(self, what: str, done: int, total: int) -> None:
        self._stage = Waiting.for_stage(what, done, total)
        if self._is_closed:
            # loading frees everything, as it does when Ctrl-C interrupts it
            raise KeyboardInterrupt

    @property
    def waiting(self) -> Waiting | None:
        """Tell what an answer waits for now. Another thread may ask."""
        if self._opening is None or not self._opening.done():
            return self._stage
        if self._opening.exception() is not None:
            return None
        progress = self._opening.result().prompt_progress()
        if progress is None:
            return None
        done, total = progress
        return Waiting("prompt", f"{done:,} of {total:,}")

    @cached_property
    def llm(self) -> "nanoserve.LLM":
        """The LLM, once it is open. Raises NanoserveError if it cannot be opened."""
        self.start()
        assert self._opening is not None, "it has been started"
        llm = self._opening.result()
        for told in (llm.built.choice, llm.tokenizer.notice):
            if told:
                self._notify(told)
        return llm

    def wait(self) -> None:
        """Wait until the LLM is open. Raises NanoserveError if it cannot be opened."""
        _ = self.llm

    def close(self) -> None:
        """Free the LLM. One that is being loaded is given up, and frees itself."""
        self._is_closed = True
        if self._opening is None:
            return
        if wait([self._opening], _LEAVING_SECONDS).not_done:
            self._opening.add_done_callback(_close_opened)
        else:
            _close_opened(self._opening)

    @property
    def defaults(self) -> SamplingParams | None:
        return self.llm.default_sampling_params()

    @property
    def context(self) -> int | None:
        """The most tokens of prompt and answer."""
        return self.llm.built.max_model_len

    def count_tokens(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> int | None:
        """Count the conversation's tokens as the model sees it; None if the count is unknown."""
        return len(self._encode(conversation, add_generation_prompt=add_generation_prompt))

    def count_text(self, text: str) -> int:
        """Count the tokens of a text by itself. Raises PromptTooLong for far more than the context
        holds."""
        tokens = self.llm.tokenizer.encode(text, add_special_tokens=False, limit=self.context)
        return len(tokens)

    def again(self) -> "LocalModel":
        """The model, closed, to be opened once more."""
        model = LocalModel(self.name, self._open, self._notify, self.seed, drafts=self._drafts)
        model.thinking = self.thinking
        return model

    def answer_parser(self, conversation: Conversation) -> "AnswerParser":
        """A parser for the answer to this conversation."""
        return self.llm.tokenizer.answer_parser(self._encode(conversation))

    @property
    def can_switch_thinking(self) -> bool:
        """Whether the model's chat template has a switch for reasoning."""
        return self.llm.tokenizer.thinking_switch is not None

    def _template_arguments(self) -> Mapping[str, Any]:
        switch = self.llm.tokenizer.thinking_switch
        if switch is None or self.thinking is None:
            return {}
        if self.thinking:
            return switch.on
        return switch.off

    def _encode(
        self, conversation: Conversation, *, add_generation_prompt: bool = True
    ) -> list[int]:
        return self.llm.tokenizer.encode_chat(
            conversation,
            add_generation_prompt=add_generation_prompt,
            template_arguments=self._template_arguments(),
        )

    def stream(self, conversation: Conversation, settings: Settings) -> Answers:
        return stream_answer(
            self.llm, conversation, settings, self._template_arguments(), drafts=self._drafts
        )


def _close_opened(opening: "Future[nanoserve.LLM]") -> None:
    if opening.exception() is None:
        opening.result().close()


def stream_answer(
    llm: "nanoserve.LLM",
    prompt: str | Conversation,
    settings: Settings,
    template_arguments: Mapping[str, Any] | None = None,
    *,
    drafts: bool = False,
) -> Answers:
    """Answer, with the drafts of text diffusion if asked for them. Raises NanoserveError if there
    is no answer, or none any more."""
    tokens = steps = 0
    params = sampling_params(llm.default_sampling_params(), settings)
    stream = llm.stream(prompt, params, template_arguments=template_arguments, drafts=drafts)
    with closing(stream):
        for output in stream:
            sample = output.outputs[0]
            if sample.error is not None:
                raise RuntimeFailure(sample.error)
            tokens += len(sample.token_ids)
            if sample.token_ids and llm.built.config.speculate:
                steps += 1
            usage = AnswerUsage.of(output, tokens, steps or None)
            yield ChatAnswer(
                sample.text, "", usage, sample.finish_reason, sample.marks, output.draft
            )
