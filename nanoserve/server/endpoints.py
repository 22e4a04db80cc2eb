"""Functions that answer the paths of the API; `make_app` lists the paths."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanoserve import __version__
from nanoserve.errors import NanoserveError, RuntimeFailure, UsageError
from nanoserve.request import CompletionOutput, SamplingParams
from nanoserve.server import schemas
from nanoserve.server.answers import ChatFormat, CompletionFormat, TextFormat
from nanoserve.server.engine_client import EngineState
from nanoserve.server.http_bodies import (
    ApiError,
    JsonResponse,
    as_api_error,
    read_json_body,
    until_client_goes,
)
from nanoserve.server.service import Service
from nanoserve.server.streams import RequestStream, deltas, wholes
from nanoserve.server.tools import ToolUse, tool_use
from nanoserve.text.answers.forms import PLAIN, REQUIRED_CALL, AnswerParser
from nanoserve.text.grammar import CANNOT_FOLLOW
from nanoserve.text.tokenizer import Tokenizer

Fields = TypeVar("Fields", bound=schemas.ModelField)
T = TypeVar("T")
Event = dict[str, Any]

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy must pass each event on at once
]
_DONE = b"data: [DONE]\n\n"


def _service(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


async def _asked(http: HttpRequest, schema: type[Fields]) -> tuple[Service, Fields]:
    """The service, and the request in the body, which names this server's model or none."""
    service = _service(http)
    asked = schemas.parse(
        await read_json_body(http, service.limits.body_bytes, service.limits.client_seconds), schema
    )
    service.check_model(asked.model)
    return service, asked


async def chat_completions(http: HttpRequest) -> "CompletionAnswer":
    service, asked = await _asked(http, schemas.ChatRequest)
    facts = service.facts()
    tokenizer = service.tokenizer
    use = tool_use(asked, tokenizer.answer_form)
    opening = None  # the text with which the answer has to begin
    if schemas.wants_json(asked):
        opening = ""
    arguments = schemas.template_arguments(asked, tokenizer)
    if use is not None:
        opening = use.opening
        arguments["tools"] = msgspec.to_builtins(use.tools)
    prompt = await service.encode_chat(
        asked.messages, context=facts.max_model_len, template_arguments=arguments, answer=opening
    )
    schemas.check_token_ids(prompt, facts, "messages")
    schema = None
    field = "response_format"
    if use is not None and use.required:
        schema = use.call_schema()
        field = "tools"
    params = schemas.chat_params(asked, facts, len(prompt), schema)
    if params.json_schema is not None:
        await service.check_json_schema(params.json_schema, field)
    parser = partial(
        _answer_parser, tokenizer, prompt, use, constrained=params.json_schema is not None
    )
    parallel = asked.parallel_tool_calls is not False
    answer = ChatFormat(service.model_name, service.text_of, parser, parallel=parallel)
    return _begin(http, asked, answer, [prompt], [params])


def _answer_parser(
    tokenizer: Tokenizer, prompt: Sequence[int], use: ToolUse | None, *, constrained: bool
) -> AnswerParser:
    """A parser for one answer to the prompt. An answer that a schema constrains is a call, or JSON,
    and nothing else."""
    form = PLAIN
    tools: dict[str, dict[str, Any]] = {}
    if use is not None:
        form = REQUIRED_CALL
        tools = use.schemas
    if constrained:
        return AnswerParser(form, tokenizer.markers, tools)
    return tokenizer.answer_parser(prompt, tools)


async def completions(http: HttpRequest) -> "CompletionAnswer":
    service, asked = await _asked(http, schemas.CompletionRequest)
    facts = service.facts()
    as_given = _prompts(asked.prompt, service.limits.prompts)
    prompts: list[list[int]] = []
    for given in as_given:
        if isinstance(given, str):
            prompt = await service.encode(given, context=facts.max_model_len)
        else:
            prompt = given
        # a tokenizer may have more tokens than the model
        schemas.check_token_ids(prompt, facts, "prompt")
        prompts.append(prompt)
    each = schemas.completion_params(asked, facts, [len(prompt) for prompt in prompts])
    echoes: list[str] = []
    if asked.echo:
        for given in as_given:
            if isinstance(given, str):
                text = given
            else:
                text = await service.decode(given, skip_special_tokens=True)
            echoes += [text] * each[0].n
    answer = TextFormat(service.model_name, service.text_of, service.tokenizer, echoes)
    return _begin(http, asked, answer, prompts, each)


def _prompts(given: str | list[str | int | list[int]], most: int) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids."""
    prompts: list[Any]
    if isinstance(given, str):
        prompts = [given]
    else:
        kinds = set(map(type, given))  # there may be half a million tokens
        if int in kinds and len(kinds) > 1:
            raise ApiError(
                400, "prompt mixes token ids with texts or lists of them", param="prompt"
            )
        prompts = given
        if kinds <= {int}:  # the token ids of one prompt
            prompts = [given]
    if len(prompts) > most:
        raise ApiError(
            400, f"{len(prompts)} prompts in one request; at most {most} are taken", param="prompt"
        )
    if not all(prompts):
        raise ApiError(
            400, "the prompt is empty: give some text", code="invalid_value", param="prompt"
        )
    return cast(list[str | list[int]], prompts)


def _begin(
    http: HttpRequest,
    asked: schemas.SamplingFields,
    answer: CompletionFormat,
    prompts: Sequence[list[int]],
    params: Sequence[SamplingParams],
) -> "CompletionAnswer":
    service = _service(http)
    key = http.scope.get("api_key")
    user = asked.user
    if not user and isinstance(asked, schemas.ChatRequest):
        user = asked.safety_identifier
    requests = []
    for prompt, each in zip(prompts, params, strict=True):
        request = service.request(answer.answer_id, prompt, each, key)
        requests.append(replace(request, priority=asked.priority or 0, user=user or ""))
    return CompletionAnswer(service, asked, answer, service.begin(requests))


@dataclass(frozen=True)
class CompletionAnswer:
    """The response to a completion request, whole or in chunks. Its requests end when the client
    goes."""

    service: Service
    asked: schemas.SamplingFields
    answer: CompletionFormat
    streams: Sequence[RequestStream]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if self.asked.stream:
                with suppress(ClientDisconnect):
                    await until_client_goes(receive, self._send_events(send))
                return
            content = await until_client_goes(receive, self._in_time(self.whole()))
        finally:
            self.service.end(self.streams)
        await JsonResponse(content, headers={"x-request-id": self.answer.answer_id})(
            scope, receive, send
        )

    async def _send_events(self, send: Send) -> None:
        """The answer as server-sent events; an error on the way is an event too."""

        async def emit(event: object) -> None:
            data = b"data: " + msgspec.json.encode(event) + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def emit_chunks() -> None:
            async for chunk in self.chunks():
                await emit(chunk)
                # a step may end thousands of samples; other requests run in between
                await asyncio.sleep(0)

        headers = _EVENT_HEADERS + [(b"x-request-id", self.answer.answer_id.encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            await self._in_time(emit_chunks())
        except NanoserveError as error:
            await emit(as_api_error(error).body())
        await send({"type": "http.response.body", "body": _DONE})

    async def _in_time(self, work: Awaitable[T]) -> T:
        seconds = self.service.limits.request_seconds
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            message = f"the answer was not complete within {seconds:g} s (--request-timeout)"
            raise ApiError(504, message, code="timeout") from None

    async def whole(self) -> Event:
        outputs = await wholes(self.streams)
        choices: list[msgspec.Raw] = []
        tokens = 0
        for output in outputs:
            for sample in output.outputs:
                _check(sample)
                tokens += len(sample.token_ids)
                choice = await self.answer.choice(len(choices), output, sample)
                choices.append(msgspec.Raw(msgspec.json.encode(choice)))
                # Thousands of samples with log probabilities take long, and other requests run in
                # between.
                await asyncio.sleep(0)
        usage = self._usage(tokens, sum(output.cached_tokens for output in outputs))
        return self.answer.envelope(self.answer.kind, choices) | {"usage": usage}

    async def chunks(self) -> AsyncIterator[Event]:
        """The answer in chunks. If the client asks for usage, each chunk has null, as OpenAI's, or
        the counts so far, as vLLM's."""
        options = self.asked.stream_options or schemas.StreamOptions()
        tokens = 0
        cached = {}
        async for place, output in deltas(self.streams):
            cached[place] = output.cached_tokens
            for sample in output.outputs:
                _check(sample)
                tokens += len(sample.token_ids)
                index = place * self.streams[0].request.params.n + sample.index
                choice = await self.answer.choice(index, output, sample, name="delta")
                if not any(
                    choice.get(name) for name in ("delta", "text", "finish_reason", "logprobs")
                ):
                    continue
                chunk = self._chunk([choice])
                if options.include_usage:
                    chunk["usage"] = None
                    if options.continuous_usage_stats:
                        chunk["usage"] = self._usage(tokens, 0)
                yield chunk
        if options.include_usage:
            yield self._chunk([]) | {"usage": self._usage(tokens, sum(cached.values()))}

    def _chunk(self, choices: Sequence[Event]) -> Event:
        return self.answer.envelope(self.answer.chunk_kind, choices)

    def _usage(self, completion_tokens: int, cached_tokens: int) -> Event:
        """Tokens of the answer, summed over all its prompts and samples."""
        prompt_tokens = sum(len(stream.request.prompt) for stream in self.streams)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


def _check(sample: CompletionOutput) -> None:
    if sample.error is not None:
        if sample.error.startswith(CANNOT_FOLLOW):
            raise UsageError(sample.error)
        raise RuntimeFailure(sample.error)


async def tokenize(http: HttpRequest) -> Response:
    """The token ids of a text or of a conversation, as the model would see them."""
    service, asked = await _asked(http, schemas.TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", code="invalid_value")
    if asked.messages is not None:
        tokens = await service.encode_chat(
            asked.messages, add_generation_prompt=asked.add_generation_prompt
        )
    else:
        tokens = await service.encode(
            asked.prompt or "", add_special_tokens=asked.add_special_tokens
        )
    return JsonResponse(
        {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
    )


async def detokenize(http: HttpRequest) -> Response:
    """The text of token ids, control tokens included."""
    service, asked = await _asked(http, schemas.DetokenizeRequest)
    facts = service.facts()
    schemas.check_token_ids(asked.tokens, facts, "tokens")
    if len(asked.tokens) > facts.max_model_len:
        message = (
            f"{len(asked.tokens)} tokens; at most the {facts.max_model_len} of a context are taken"
        )
        raise ApiError(400, message, code="context_length_exceeded", param="tokens")
    return JsonResponse({"prompt": await service.decode(asked.tokens)})


async def models(http: HttpRequest) -> Response:
    return JsonResponse({"object": "list", "data": [_model_card(_service(http))]})


async def model(http: HttpRequest) -> Response:
    service = _service(http)
    service.check_model(http.path_params["name"])
    return JsonResponse(_model_card(service))


def _model_card(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "nanoserve",
        "root": service.root,
        "max_model_len": service.max_model_len,
    }


async def health(http: HttpRequest) -> Response:
    """Answer whether the server is alive: 503 when its engine keeps failing."""
    engine = _service(http).engine
    if engine.state is EngineState.FAILED:
        raise ApiError(503, engine.describe_state(), code="engine_unavailable")
    return JsonResponse({"status": "ok", "engine": engine.state.name.lower()})


async def ready(http: HttpRequest) -> Response:
    """Answer whether requests should be sent here: 503 while the engine cannot run them."""
    service = _service(http)
    service.facts()
    if not service.engine.serving:
        raise ApiError(503, service.engine.describe_state(), code="engine_unavailable")
    return JsonResponse({"status": "ready"})


async def version(http: HttpRequest) -> Response:
    return JsonResponse({"version": __version__})


async def metrics(http: HttpRequest) -> Response:
    return Response(
        _service(http).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
