"""What each path of the API does."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nanoserve import __version__
from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.request import CompletionOutput, Request
from nanoserve.server.answers import ChatFormat, CompletionFormat, CompletionUsage, TextFormat
from nanoserve.server.api_errors import ApiError, JsonResponse, as_api_error
from nanoserve.server.engine_client import EngineState
from nanoserve.server.http_bodies import Emit, EventStream, read_json_body, until_client_goes
from nanoserve.server.sampling import chat_params, check_token_ids, completion_params
from nanoserve.server.schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    ModelField,
    SamplingFields,
    TokenizeRequest,
    parse,
)
from nanoserve.server.service import Service, cache_salt
from nanoserve.server.streams import RequestStream, deltas, wholes

Fields = TypeVar("Fields", bound=ModelField)


def _service(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


async def _asked(http: HttpRequest, schema: type[Fields]) -> Fields:
    """The request in the body, which names this server's model or none."""
    service = _service(http)
    asked = parse(await read_json_body(http, service.limits), schema)
    service.check_model(asked.model)
    return asked


# ---- generating text ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Completion:
    """A client's request, checked and tokenized: the engine's requests, and the format of the answer."""

    asked: SamplingFields
    answer: CompletionFormat
    requests: list[Request]

    @property
    def samples(self) -> int:
        """Samples of each prompt; the choices of prompt p are p * samples, p * samples + 1, ..."""
        return self.requests[0].params.n

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.asked.stream_options is not None and self.asked.stream_options.include_usage

    def usage(self) -> CompletionUsage:
        """The usage before any answer: the prompts are counted."""
        return CompletionUsage(prompt_tokens=sum(len(request.prompt) for request in self.requests))

    def usage_so_far(self, usage: CompletionUsage) -> dict[str, Any]:
        """The usage in a chunk: as OpenAI has it null in all but the last, or as vLLM has it the counts so far."""
        options = self.asked.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": usage.as_json() if options.continuous_usage_stats else None}


async def chat_completions(http: HttpRequest) -> Response:
    """``POST /v1/chat/completions``"""
    service, asked = _service(http), await _asked(http, ChatRequest)
    facts = service.facts()
    prompt = await service.encode_chat(asked.messages, context=facts.max_model_len)
    params = chat_params(asked, facts, len(prompt))
    if params.json_schema is not None:
        await service.check_json_schema(params.json_schema)
    answer = ChatFormat(service.model_name, service.texts)
    request = service.request(answer.answer_id, prompt, params, cache_salt(http.scope.get("api_key")))
    return await _respond(http, service, _Completion(asked, answer, [request]))


async def completions(http: HttpRequest) -> Response:
    """``POST /v1/completions``"""
    service, asked = _service(http), await _asked(http, CompletionRequest)
    facts = service.facts()
    answer = TextFormat(service.model_name, service.texts)
    salt = cache_salt(http.scope.get("api_key"))
    prompts = []
    for given in _prompts(asked.prompt, service.limits.prompts):
        if isinstance(given, str):
            prompts.append(await service.encode(given, context=facts.max_model_len))
        else:
            check_token_ids(given, facts, "prompt")
            prompts.append(given)
    each = completion_params(asked, facts, [len(prompt) for prompt in prompts])
    requests = [
        service.request(answer.answer_id, prompt, params, salt) for prompt, params in zip(prompts, each, strict=True)
    ]
    return await _respond(http, service, _Completion(asked, answer, requests))


def _prompts(given: str | list[str | int | list[int]], most: int) -> list[str | list[int]]:
    """The prompts of a request, each a text or token ids."""
    kinds = {str} if isinstance(given, str) else set(map(type, given))  # there may be half a million tokens
    if int in kinds and len(kinds) > 1:
        raise ApiError(400, "prompt mixes token ids with texts or lists of them", param="prompt")
    prompts = [given] if isinstance(given, str) or kinds <= {int} else given
    if len(prompts) > most:
        raise ApiError(400, f"{len(prompts)} prompts in one request; at most {most} are taken", param="prompt")
    if not all(prompts):
        raise ApiError(400, "the prompt is empty: give some text", code="invalid_value", param="prompt")
    return cast(list[str | list[int]], prompts)


async def _respond(http: HttpRequest, service: Service, completion: _Completion) -> Response:
    headers = {"x-request-id": completion.answer.answer_id}
    streams = service.begin(completion.requests)
    if completion.asked.stream:
        return EventStream(partial(_stream, service, completion, streams), partial(service.end, streams), headers)
    try:
        content = await until_client_goes(http.receive, _whole(service, completion, streams))
    finally:
        service.end(streams)
    return JsonResponse(content, headers=headers)


async def _whole(service: Service, completion: _Completion, streams: Sequence[RequestStream]) -> object:
    """The answer at once."""
    try:
        async with asyncio.timeout(service.limits.request_seconds):
            outputs = await wholes(streams)
    except TimeoutError:
        raise _timed_out(service) from None
    usage = completion.usage()
    choices = []
    for place, sample in enumerate(sample for output in outputs for sample in output.outputs):
        _check(sample)
        usage.completion_tokens += len(sample.token_ids)
        # One at a time: thousands of samples with log probabilities take long, and other requests run in between.
        choices.append(msgspec.Raw(msgspec.json.encode(completion.answer.choice(place, sample))))
        await asyncio.sleep(0)
    usage.cached_tokens = sum(output.cached_tokens for output in outputs)
    return completion.answer.whole(choices, usage)


async def _stream(service: Service, completion: _Completion, streams: Sequence[RequestStream], emit: Emit) -> None:
    """The answer in chunks; an error on the way is a chunk too."""
    try:
        async with asyncio.timeout(service.limits.request_seconds):
            await _emit_chunks(completion, streams, emit)
    except TimeoutError:
        await emit(_timed_out(service).body())
    except (ApiError, NanoserveError) as error:
        await emit(as_api_error(error).body())


async def _emit_chunks(completion: _Completion, streams: Sequence[RequestStream], emit: Emit) -> None:
    answer, usage = completion.answer, completion.usage()
    async for place, output in deltas(streams):
        for sample in output.outputs:
            _check(sample)
            usage.completion_tokens += len(sample.token_ids)
            if sample.text or sample.finish_reason or sample.logprobs:
                chunk = answer.chunk(place * completion.samples + sample.index, sample)
                await emit(chunk | completion.usage_so_far(usage))
    if completion.wants_usage:
        usage.cached_tokens = sum(stream.cached_tokens for stream in streams)
        await emit(answer.usage_chunk(usage))


def _check(sample: CompletionOutput) -> None:
    if sample.error is not None:
        raise RuntimeFailure(sample.error)


def _timed_out(service: Service) -> ApiError:
    message = f"the answer was not complete within {service.limits.request_seconds:g} s (--request-timeout)"
    return ApiError(504, message, code="timeout")


# ---- tokens ---------------------------------------------------------------------------------------------------


async def tokenize(http: HttpRequest) -> Response:
    """``POST /tokenize``: the token ids of a text or of a conversation, as the model would see them."""
    service, asked = _service(http), await _asked(http, TokenizeRequest)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", code="invalid_value")
    if asked.messages is not None:
        tokens = await service.encode_chat(asked.messages, add_generation_prompt=asked.add_generation_prompt)
    else:
        tokens = await service.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens)
    return JsonResponse({"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens})


async def detokenize(http: HttpRequest) -> Response:
    """``POST /detokenize``: the text of token ids, control tokens included."""
    service, asked = _service(http), await _asked(http, DetokenizeRequest)
    facts = service.facts()
    check_token_ids(asked.tokens, facts, "tokens")
    if len(asked.tokens) > facts.max_model_len:
        message = f"{len(asked.tokens)} tokens; at most the {facts.max_model_len} of a context are taken"
        raise ApiError(400, message, code="context_length_exceeded", param="tokens")
    return JsonResponse({"prompt": await service.decode(asked.tokens)})


# ---- the server itself ----------------------------------------------------------------------------------------


async def models(http: HttpRequest) -> Response:
    """``GET /v1/models``"""
    return JsonResponse({"object": "list", "data": [_model_card(_service(http))]})


async def model(http: HttpRequest) -> Response:
    """``GET /v1/models/{name}``"""
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
    """``GET /health``: whether the server should be left alone; 503 when its engine keeps failing."""
    engine = _service(http).engine
    if engine.state is EngineState.FAILED:
        raise ApiError(503, engine.describe_state(), code="engine_unavailable")
    return JsonResponse({"status": "ok", "engine": engine.state.name.lower()})


async def ready(http: HttpRequest) -> Response:
    """``GET /ready``: whether requests should be sent here."""
    service = _service(http)
    service.facts()
    if not service.engine.serving:
        raise ApiError(503, service.engine.describe_state(), code="engine_unavailable")
    return JsonResponse({"status": "ready"})


async def version(http: HttpRequest) -> Response:
    """``GET /version``"""
    return JsonResponse({"version": __version__})


async def metrics(http: HttpRequest) -> Response:
    """``GET /metrics``"""
    return Response(_service(http).metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
