"""LLM: the offline API. Puts a model, a tokenizer and an engine together in this process."""

import random
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import ExitStack
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Self

from nanoserve.engine.assembly import build_engine
from nanoserve.engine.dispatcher import Dispatcher
from nanoserve.engine.engine import Engine
from nanoserve.engine.outputs import RequestTracker
from nanoserve.engine_config import EngineConfig
from nanoserve.errors import NanoserveError, UsageError
from nanoserve.models.hub import ResolvedModel, resolve_model
from nanoserve.record.counters import EngineStatus
from nanoserve.request import (
    MAX_SEED,
    FinishReason,
    Request,
    RequestOutput,
    RequestShape,
    SamplingParams,
    SequenceUpdate,
)
from nanoserve.text.grammar.checker import GrammarChecker
from nanoserve.text.tokenizer import Tokenizer, load_tokenizer
from nanoserve.utils.interrupts import deferred_interrupts

Message = Mapping[str, Any]
Prompt = str | SequenceOf[int] | SequenceOf[Message]
"""Text, token ids, or the messages of a conversation."""
_WATCHED_SECONDS = 0.1  # longest wait of a step with an observer; the next step continues to wait for the same result


class LLM:
    """A model that answers in this process; its engine runs in the calling thread.

    Use it as a context manager, so that its memory is freed::

        with LLM() as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)

    ``model`` is a directory, a Hugging Face id, ``dummy:NAME``, None for the bundled storyteller, or what
    `resolve_model` found. ``progress`` is called with (stage, done, total) while downloading and loading. ``settings``
    are the fields of EngineConfig; environment variables such as NANOSERVE_POLICY are for commands and set none. If
    these leave layout or policy open, ``choice`` says what was chosen and why: for a batch of the lengths that
    ``expected`` returns when it is called with the tokenizer and the longest sequence in tokens, or without it for
    requests that come one by one. Raises ModelError if the model cannot be used, UsageError if a setting is not valid
    for this model or machine.
    """

    def __init__(
        self,
        model: str | Path | ResolvedModel | None = None,
        *,
        progress: Any = None,
        expected: Callable[[Tokenizer, int], SequenceOf[RequestShape]] | None = None,
        **settings: Any,
    ) -> None:
        config = EngineConfig(**settings)
        self._random = random.Random(config.seed)
        if not isinstance(model, ResolvedModel):
            name = None if model is None else str(model)
            model = resolve_model(name, offline=config.offline, progress=progress)
        self.model_name = model.name
        self.tokenizer = load_tokenizer(model.tokenizer_directory)
        with ExitStack() as failing:
            failing.callback(self.tokenizer.close)
            asked = None if expected is None else partial(expected, self.tokenizer)
            built = build_engine(model, config, progress, asked)
            failing.callback(built.engine.close)
            self._grammars = GrammarChecker(model.tokenizer_directory)
            failing.pop_all()  # the LLM closes them
        self.engine_config, self.choice = built.config, built.choice  # None where nothing was left open
        self.driven = built.engine  # the engine, or the dispatcher of several
        self.config, self.max_model_len = built.model, built.max_model_len
        self._default_params = built.default_params
        self._operators, self._layers = built.operators, built.layers
        self.gpu = built.gpu  # the costs of preparing the GPU (`GpuFacts`); None without a GPU
        self.speeds = built.speeds  # measured speeds of each worker; None if no decision needs them
        self.end_tokens = self.tokenizer.end_tokens(self.config.eos_token_ids)
        self._trackers: dict[str, RequestTracker] = {}
        self._names = count()

    @property
    def engine(self) -> Engine:
        """The only engine, for callers that look inside. Raises UsageError if there are several."""
        if isinstance(self.driven, Dispatcher):
            raise UsageError(
                f"this is for one engine, not {len(self.driven.engines)}: leave out --dp, or the D of the layouts"
            )
        return self.driven

    @property
    def status(self) -> EngineStatus:
        """The status of the engine, or of all engines together."""
        return self.driven.status

    @property
    def compiled(self) -> bool:
        """Whether the model's layers run compiled."""
        return self.gpu.compiled if self.gpu is not None else self._layers is not None and self._layers.loaded

    def start_preparing(self) -> None:
        """Start to compile layers in the background. They are used as soon as they are ready."""
        if self._layers is not None:
            self._layers.start()

    def prepare(self, progress: Any = None) -> None:
        """Wait until everything is compiled: before long batches and before measurements.

        This takes a minute the first time that a model runs on a machine, and no time later. On a very busy machine,
        code that is not compiled after some minutes is left uncompiled. ``progress`` is called as in the constructor.
        """
        stages = [("building operators", self._operators), ("compiling layers", self._layers)]
        for _, built in stages:
            if built is not None:
                built.start(waited=True)
        for stage, built in stages:
            if built is not None and built.pending:
                if progress is not None:
                    progress(stage, 0, 1)
                built.wait()
                if progress is not None:
                    progress(stage, 1, 1)

    def default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends."""
        return self._default_params

    # ---- asking -----------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | SequenceOf[int] | SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        priority: int | SequenceOf[int] = 0,
        user: str | SequenceOf[str] = "",
    ) -> list[RequestOutput]:
        """Continue one prompt or several, each as text or as token ids; the outputs are in the order of the prompts.

        ``params`` are one for all prompts or one for each; None takes the model's defaults. So are ``priority`` and
        ``user``, by which policies may order. Raises UsageError if a prompt can never run here; then none of them runs.
        """
        one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        # mypy cannot infer from the line above whether it is one prompt or several.
        every = [prompts] if one else list(prompts)
        return self._run_all(every, params, priority, user)  # type: ignore[arg-type]

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; messages are {"role": ..., "content": ...}. Raises UsageError if a
        conversation is malformed or too long."""
        one = len(messages) == 0 or isinstance(messages[0], Mapping)
        # As in `generate`, mypy cannot infer which it is.
        return self._run_all([messages] if one else list(messages), params)  # type: ignore[list-item, arg-type]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> Generator[RequestOutput, None, None]:
        """Yield new output as it comes; closing the generator aborts the request. ``template_arguments`` are those of
        `Tokenizer.encode_chat`, for the messages of a conversation. Raises UsageError at once, if the prompt can never
        run here."""
        stream = self._stream(self._add(prompt, params, template_arguments=template_arguments))
        next(stream)  # closing a generator that has not started would not run its `finally`
        return stream

    def _stream(self, tracker: RequestTracker) -> Generator[RequestOutput, None, None]:
        """Yield new output; the first item is empty and comes before any step."""
        try:
            yield tracker.delta()
            while tracker.has_news or not tracker.finished:
                if tracker.has_news:  # perhaps from a step for another stream
                    yield tracker.delta()
                else:
                    self._step()
        finally:
            self._forget(tracker)

    def generate_as_completed(
        self,
        items: Iterable[tuple[Prompt, SamplingParams | None]],
        *,
        on_step: Callable[[SequenceOf[SequenceUpdate]], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | NanoserveError]]:
        """Yield (position, output) in the order in which requests finish; a refused request yields its error.

        ``items`` is read only as far ahead as the engine needs, so it may be long. ``on_step`` is called with the
        updates of each step, several times a second even without any.
        """
        pending = enumerate(items)
        running: dict[int, RequestTracker] = {}
        exhausted = False
        try:
            while running or not exhausted:
                while not exhausted and self._wants_more:
                    position, item = next(pending, (0, None))
                    exhausted = item is None
                    try:
                        if item is not None:
                            running[position] = self._add(*item)
                    except NanoserveError as error:
                        yield position, error
                if running:
                    updates = self._step(None if on_step is None else self.driven.now() + _WATCHED_SECONDS)
                    if on_step is not None:
                        on_step(updates)
                for position in [position for position, tracker in running.items() if tracker.finished]:
                    tracker = running.pop(position)
                    self._forget(tracker)
                    yield position, tracker.whole()
        finally:
            for tracker in running.values():
                self._forget(tracker)

    def _run_all(self, prompts: SequenceOf[Prompt], *settings: Any) -> list[RequestOutput]:
        """Each of the settings is one for all prompts, or a list with one for each."""
        each = [given if isinstance(given, list | tuple) else [given] * len(prompts) for given in settings]
        if counts := {len(given) for given in each} - {len(prompts)}:
            raise UsageError(f"{len(prompts)} prompts, but a list of {counts.pop()} settings: give one or as many")
        trackers: list[RequestTracker] = []
        try:
            for prompt, *one in zip(prompts, *each, strict=True):
                trackers.append(self._add(prompt, *one))
            while not all(tracker.finished for tracker in trackers):
                self._step()
            return [tracker.whole() for tracker in trackers]
        finally:
            for tracker in trackers:
                self._forget(tracker)

    # ---- engine -----------------------------------------------------------------------------------------------

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        priority: int = 0,
        user: str = "",
        template_arguments: Mapping[str, Any] | None = None,
    ) -> RequestTracker:
        params = params or self.default_sampling_params()
        text, tokens = self._tokenize(prompt, template_arguments)
        limit = self.config.max_position_embeddings  # --max-model-len cannot be raised beyond it
        if len(tokens) + (params.max_tokens != 0) > limit:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, but the model's own limit is {limit} with at least one for the "
                "answer; shorten the prompt"
            )
        if params.json_schema is not None:
            self._grammars.check(params.json_schema)
        request = Request(
            request_id=f"request-{next(self._names)}",
            prompt=tuple(tokens),
            params=params,
            seed=self._random.randint(0, MAX_SEED) if params.seed is None else params.seed,
            end_tokens=self.end_tokens,
            arrival_time=self.driven.now(),
            priority=priority,
            user=user,
        )
        self.driven.add(request)
        tracker = RequestTracker(request, self.tokenizer, prompt=text)
        self._trackers[request.request_id] = tracker
        return tracker

    @property
    def _wants_more(self) -> bool:
        """Whether an engine might run out of prompts. Sequences in host memory do not count as waiting."""
        status = self.status
        return status.waiting < self.engine_config.max_num_seqs * len(status.layouts)

    def _tokenize(
        self, prompt: Prompt, template_arguments: Mapping[str, Any] | None
    ) -> tuple[str | None, SequenceOf[int]]:
        if isinstance(prompt, str):
            if not prompt:  # with a BOS in front, the token ids would not be empty
                raise UsageError("the prompt is empty: give some text")
            return prompt, self.tokenizer.encode(prompt)
        if len(prompt) > 0 and isinstance(prompt[0], Mapping):
            # It checks every message itself.
            return None, self.tokenizer.encode_chat(prompt, template_arguments=template_arguments)  # type: ignore[arg-type]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in prompt):
            raise UsageError("a prompt is text, a list of token ids, or a list of messages")
        return None, prompt  # type: ignore[return-value]  # checked above

    def _step(self, until: float | None = None) -> list[SequenceUpdate]:
        """One engine step, which waits at most until `until`. Ctrl-C is deferred, so that no step is left half done."""
        with deferred_interrupts():
            updates = self.driven.step(until)
            now = self.driven.now()
            for update in updates:
                tracker = self._trackers.get(update.request_id)
                if tracker is not None and tracker.take(update, now):
                    self.driven.stop(update.request_id, index=update.index, reason=FinishReason.STOP)
        return updates

    def _forget(self, tracker: RequestTracker) -> None:
        """Drop a request whose caller is done, and abort it if it still runs."""
        if self._trackers.pop(tracker.request.request_id, None) is not None and not tracker.finished:
            self.driven.stop(tracker.request.request_id)

    def close(self) -> None:
        """Free the engine's memory and end the child processes."""
        self.driven.close()
        self.tokenizer.close()
        self._grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
