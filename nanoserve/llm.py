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
from nanoserve.engine.engine import Engine
from nanoserve.engine.outputs import Canvas, RequestTracker
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
# longest wait of a step with an observer; the next step continues to wait for the same result
_WATCHED_SECONDS = 0.1


class LLM:
    """A model that answers in this process; its engine runs in the calling thread.

    Use it as a context manager, so that its memory is freed::

        with LLM() as llm:
            print(llm.generate("Once upon a time")[0].outputs[0].text)

    ``model`` is a directory, a Hugging Face id, ``dummy:NAME``, None for the bundled storyteller,
    or what `resolve_model` found. ``progress`` is called with (stage, done, total) while
    downloading and loading. ``settings`` are the fields of EngineConfig; environment variables such
    as NANOSERVE_POLICY are for commands and set none.

    ``built`` is the engine with the model's shape and the settings in use. If the settings leave
    layout or policy open, ``built.choice`` says what was chosen and why: for a batch of the lengths
    that ``expected`` returns when it is called with the tokenizer and the longest sequence in
    tokens, or without it for requests that come one by one.

    Raises ModelError if the model cannot be used, UsageError if a setting is not valid for this
    model or machine.
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
            name = None
            if model is not None:
                name = str(model)
            model = resolve_model(name, offline=config.offline, progress=progress)
        self.model_name = model.name
        self.tokenizer = load_tokenizer(model.tokenizer_directory)
        with ExitStack() as failing:
            failing.callback(self.tokenizer.close)
            asked = None
            if expected is not None:
                asked = partial(expected, self.tokenizer)
            self.built = build_engine(model, config, progress, asked)
            failing.callback(self.built.engine.close)
            self._grammars = GrammarChecker(model.tokenizer_directory)
            failing.pop_all()  # the LLM closes them
        self._engine = self.built.engine
        self.end_tokens = self.tokenizer.end_tokens(self.built.model.eos_token_ids)
        self._trackers: dict[str, RequestTracker] = {}
        self._names = count()

    @property
    def engine(self) -> Engine:
        """The only engine, for callers that look inside. Raises UsageError if there are several."""
        engines = self._engine.engines
        if len(engines) > 1:
            raise UsageError(
                f"this is for one engine, not {len(engines)}: leave out --dp, or the D of the "
                "layouts"
            )
        return engines[0]

    @property
    def status(self) -> EngineStatus:
        """The status of the engine, or of all engines together."""
        return self._engine.status

    def prompt_progress(self) -> tuple[int, int] | None:
        """Tokens of the newest running request's prompt that are computed, and all of its tokens;
        None if no request runs. Another thread may ask."""
        for request_id in reversed(list(self._trackers)):
            for engine in self._engine.engines:
                samples = engine.scheduler.table.requests.get(request_id)
                if samples:
                    return samples[0].prompt_computed, samples[0].prompt_length
        return None

    def default_sampling_params(self) -> SamplingParams:
        """The parameters that the model's generation_config.json recommends."""
        return self.built.default_params

    # ---- asking ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: str | SequenceOf[int] | SequenceOf[str | SequenceOf[int]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        priority: int | SequenceOf[int] = 0,
        user: str | SequenceOf[str] = "",
    ) -> list[RequestOutput]:
        """Continue one prompt or several, each as text or as token ids; the outputs are in the
        order of the prompts.

        ``params`` are one for all prompts or one for each; None takes the model's defaults. So are
        ``priority`` and ``user``, by which policies may order. Raises UsageError if a prompt can
        never run here; then none of them runs.
        """
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        # mypy cannot infer from the line above whether it is one prompt or several.
        every: list[Prompt] = [prompts] if is_one else list(prompts)  # type: ignore[list-item, arg-type]
        return self._run_all(every, params, priority, user)

    def chat(
        self,
        messages: SequenceOf[Message] | SequenceOf[SequenceOf[Message]],
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several; messages are {"role": ..., "content": ...}. Raises
        UsageError if a conversation is malformed or too long."""
        is_one = len(messages) == 0 or isinstance(messages[0], Mapping)
        # As in `generate`, mypy cannot infer which it is.
        every: list[Prompt] = [messages] if is_one else list(messages)  # type: ignore[list-item, arg-type]
        return self._run_all(every, params)

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        template_arguments: Mapping[str, Any] | None = None,
        drafts: bool = False,
    ) -> Generator[RequestOutput, None, None]:
        """Yield new output as it comes; closing the generator aborts the request.
        ``template_arguments`` are those of `Tokenizer.encode_chat`, for the messages of a
        conversation. With ``drafts``, a model that writes canvases also has its draft yielded after
        each denoising step: see `RequestOutput.draft`. Raises UsageError at once, if the prompt can
        never run here."""
        tracker = self._add(prompt, params, template_arguments=template_arguments)
        stream = self._stream(tracker, drafts=drafts)
        next(stream)  # closing a generator that has not started would not run its `finally`
        return stream

    def _stream(
        self, tracker: RequestTracker, *, drafts: bool
    ) -> Generator[RequestOutput, None, None]:
        """Yield new output; the first item is empty and comes before any step."""
        try:
            yield tracker.delta()
            while tracker.has_news or not tracker.finished:
                if tracker.has_news:  # perhaps from a step for another stream
                    yield tracker.delta()
                    continue
                self._step()
                if drafts and not tracker.has_news:
                    canvases = self._canvases(tracker.request.request_id)
                    if canvases:
                        yield tracker.draft(canvases)
        finally:
            self._forget(tracker)

    def generate_as_completed(
        self,
        items: Iterable[tuple[Prompt, SamplingParams | None]],
        *,
        on_step: Callable[[SequenceOf[SequenceUpdate]], None] | None = None,
    ) -> Iterator[tuple[int, RequestOutput | NanoserveError]]:
        """Yield (position, output) in the order in which requests finish; a refused request yields
        its error.

        ``items`` is read only as far ahead as the engine needs, so it may be long. ``on_step`` is
        called with the updates of each step, several times a second even without any.
        """
        pending = enumerate(items)
        running: dict[int, RequestTracker] = {}
        is_exhausted = False
        try:
            while running or not is_exhausted:
                while not is_exhausted and self._wants_more:
                    following = next(pending, None)
                    if following is None:
                        is_exhausted = True
                        break
                    position, (prompt, params) = following
                    try:
                        running[position] = self._add(prompt, params)
                    except NanoserveError as error:
                        yield position, error
                if running:
                    if on_step is None:
                        self._step()
                    else:
                        on_step(self._step(self._engine.now() + _WATCHED_SECONDS))
                finished = [position for position, tracker in running.items() if tracker.finished]
                for position in finished:
                    tracker = running.pop(position)
                    self._forget(tracker)
                    yield position, tracker.whole()
        finally:
            for tracker in running.values():
                self._forget(tracker)

    @property
    def _wants_more(self) -> bool:
        """Whether an engine might run out of prompts. Sequences in host memory do not count as
        waiting."""
        status = self.status
        return status.waiting < self.built.config.max_num_seqs * len(status.layouts)

    def _run_all(
        self,
        prompts: SequenceOf[Prompt],
        params: SamplingParams | SequenceOf[SamplingParams] | None,
        priority: int | SequenceOf[int] = 0,
        user: str | SequenceOf[str] = "",
    ) -> list[RequestOutput]:
        """Run prompts to their ends, each with its own setting or with that of all."""
        every_params = _for_each(prompts, params)
        every_priority = _for_each(prompts, priority)
        every_user = _for_each(prompts, user)
        trackers: list[RequestTracker] = []
        try:
            for number, prompt in enumerate(prompts):
                tracker = self._add(
                    prompt,
                    every_params[number],
                    priority=every_priority[number],
                    user=every_user[number],
                )
                trackers.append(tracker)
            while not all(tracker.finished for tracker in trackers):
                self._step()
            return [tracker.whole() for tracker in trackers]
        finally:
            for tracker in trackers:
                self._forget(tracker)

    # ---- engine ----------------------------------------------------------------------------------

    def _canvases(self, request_id: str) -> dict[int, Canvas]:
        """Return the canvases that the samples of a request write now, by their indices."""
        found = dict[int, Canvas]()
        for engine in self._engine.engines:
            canvases = engine.scheduler.extensions.canvases
            if canvases is not None:
                for sequence in engine.scheduler.table.requests.get(request_id, ()):
                    if canvas := canvases.draft(sequence):
                        found[sequence.index] = canvas
        return found

    def _add(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        user: str = "",
        template_arguments: Mapping[str, Any] | None = None,
    ) -> RequestTracker:
        """Give a prompt to the engine. Raises UsageError if it can never run."""
        if params is None:
            params = self.default_sampling_params()
        text, tokens = self._tokenize(prompt, template_arguments)
        # --max-model-len cannot be raised beyond it
        limit = self.built.model.max_position_embeddings
        fewest_answered = 1
        if params.max_tokens == 0:
            fewest_answered = 0
        if len(tokens) + fewest_answered > limit:
            raise UsageError(
                f"the prompt has {len(tokens)} tokens, but the model's own limit is {limit} with "
                "at least one for the "
                "answer; shorten the prompt"
            )
        if params.json_schema is not None:
            self._grammars.check(params.json_schema)
        seed = params.seed
        if seed is None:
            seed = self._random.randint(0, MAX_SEED)
        request = Request(
            request_id=f"request-{next(self._names)}",
            prompt=tuple(tokens),
            params=params,
            seed=seed,
            end_tokens=self.end_tokens,
            arrival_time=self._engine.now(),
            priority=priority,
            user=user,
        )
        self._engine.add(request)
        tracker = RequestTracker(request, self.tokenizer, prompt=text)
        self._trackers[request.request_id] = tracker
        return tracker

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
        """Run the engine's loop once, waiting at most until `until`, and turn its tokens into text.

        Ctrl-C is deferred, so that no step is left half done.
        """
        with deferred_interrupts():
            updates = self._engine.step(until)
            now = self._engine.now()
            for update in updates:
                tracker = self._trackers.get(update.request_id)
                if tracker is not None and tracker.take(update, now):
                    self._engine.stop(
                        update.request_id, index=update.index, reason=FinishReason.STOP
                    )
        return updates

    def _forget(self, tracker: RequestTracker) -> None:
        """Drop a request whose caller is done, and abort it if it still runs."""
        request_id = tracker.request.request_id
        was_known = self._trackers.pop(request_id, None) is not None
        if was_known and not tracker.finished:
            self._engine.stop(request_id)

    def close(self) -> None:
        """Free the engine's memory and end the child processes."""
        self._engine.close()
        self.tokenizer.close()
        self._grammars.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _for_each(prompts: SequenceOf[Prompt], given: Any) -> SequenceOf[Any]:
    """Repeat a setting for every prompt, unless it is a list with one for each."""
    if not isinstance(given, list | tuple):
        return [given] * len(prompts)
    if len(given) != len(prompts):
        raise UsageError(
            f"{len(prompts)} prompts, but a list of {len(given)} settings: give one or as many"
        )
    return given
