"""The two endpoints that generate text."""

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nanoserve.errors import NanoserveError, RuntimeFailure
from nanoserve.request import CompletionOutput, Request
from nanoserve.server.answers import Answer, ChatAnswer, CompletionAnswer, Heading, Usage
from nanoserve.server.api_errors import ApiError, JsonResponse, as_api_error
from nanoserve.server.bodies import read_json_body
from nanoserve.server.event_stream import Emit, EventStream, until_client_goes
from nanoserve.server.sampling import chat_params, check_token_ids, completion_params
from nanoserve.server.schemas import ChatRequest, CompletionRequest, SamplingFields, parse
from nanoserve.server.service import Service, cache_salt
from nanoserve.server.streams import RequestStream, deltas, wholes


@dataclass(frozen=True, slots=True)
class _Job:
    """A client's request, checked and tokenized: what the engine is asked, and how the answer looks."""

    asked: SamplingFields
    answer: Answer
    requests: list[Request]

    @property
    def samples(self) -> int:
        """Of each prompt; the choices of prompt p are p * samples, p * samples + 1, ..."""
        return self.requests[0].params.n

    def usage(self) -> Usage:
        """With the prompts counted, before any answer."""
        return Usage(prompt_tokens=sum(len(request.prompt) for request in self.requests))

    def usage_so_far(self, usage: Usage) -> dict[str, Any]:
        """What a chunk says of it: OpenAI has null in every chunk but the last, vLLM the counts where asked for."""
        options = self.asked.stream_options
        if options is None or not options.include_usage:
            return {}
        return {"usage": usage.as_json() if options.continuous_usage_stats else None}


async def chat_completions(http: HttpRequest) -> Response:
    """``POST /v1/chat/completions``"""
    service: Service = http.app.state.service
    asked = parse(await read_json_body(http, service.limits), ChatRequest)
    service.check_model(asked.model)
    facts = service.facts()
    prompt = await service.encode_chat(asked.messages, context=facts.max_model_len)
    params = chat_params(asked, facts, len(prompt))
    if params.json_schema is not None:
        await service.check_json_schema(params.json_schema)
    heading = Heading(f"chatcmpl-{secrets.token_hex(12)}", service.model_name)
    request = service.request(heading.answer_id, prompt, params, cache_salt(http.scope.get("api_key")))
    return await _respond(http, service, _Job(asked, ChatAnswer(heading, service.texts), [request]), heading)


async def completions(http: HttpRequest) -> Response:
    """``POST /v1/completions``"""
    service: Service = http.app.state.service
    asked = parse(await read_json_body(http, service.limits), CompletionRequest)
    service.check_model(asked.model)
    facts = service.facts()
    heading = Heading(f"cmpl-{secrets.token_hex(12)}", service.model_name)
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
        service.request(heading.answer_id, prompt, params, salt) for prompt, params in zip(prompts, each, strict=True)
    ]
    return await _respond(http, service, _Job(asked, CompletionAnswer(heading, service.texts), requests), heading)


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


async def _respond(http: HttpRequest, service: Service, job: _Job, heading: Heading) -> Response:
    headers = {"x-request-id": heading.answer_id}
    streams = service.begin(job.requests)
    if job.asked.stream:
        return EventStream(partial(_stream, service, job, streams), partial(service.end, streams), headers)
    try:
        content = await until_client_goes(http.receive, _whole(service, job, streams))
    finally:
        service.end(streams)
    return JsonResponse(content, headers=headers)


async def _whole(service: Service, job: _Job, streams: Sequence[RequestStream]) -> object:
    """The answer at once."""
    try:
        async with asyncio.timeout(service.limits.request_seconds):
            outputs = await wholes(streams)
    except TimeoutError:
        raise _timed_out(service) from None
    usage = job.usage()
    choices = []
    for place, sample in enumerate(sample for output in outputs for sample in output.outputs):
        _check(sample)
        usage.completion_tokens += len(sample.token_ids)
        # One at a time: with thousands of samples and log probabilities it takes long, and others go on in between.
        choices.append(msgspec.Raw(msgspec.json.encode(job.answer.choice(place, sample))))
        await asyncio.sleep(0)
    usage.cached_tokens = sum(output.cached_tokens for output in outputs)
    return job.answer.whole(choices, usage)


async def _stream(service: Service, job: _Job, streams: Sequence[RequestStream], emit: Emit) -> None:
    """The answer in pieces; what goes wrong on the way is a piece too."""
    try:
        async with asyncio.timeout(service.limits.request_seconds):
            await _emit_chunks(job, streams, emit)
    except TimeoutError:
        await emit(_timed_out(service).body())
    except ApiError as error:
        await emit(error.body())
    except NanoserveError as error:
        await emit(as_api_error(error).body())


async def _emit_chunks(job: _Job, streams: Sequence[RequestStream], emit: Emit) -> None:
    usage = job.usage()
    wants_usage = job.asked.stream_options is not None and job.asked.stream_options.include_usage
    async for place, output in deltas(streams):
        for sample in output.outputs:
            _check(sample)
            usage.completion_tokens += len(sample.token_ids)
            if sample.text or sample.finish_reason or sample.logprobs:
                await emit(job.answer.chunk(place * job.samples + sample.index, sample) | job.usage_so_far(usage))
    if wants_usage:
        usage.cached_tokens = sum(stream.cached_tokens for stream in streams)
        await emit(job.answer.usage_chunk(usage))


def _check(sample: CompletionOutput) -> None:
    if sample.error is not None:
        raise RuntimeFailure(sample.error)


def _timed_out(service: Service) -> ApiError:
    message = f"the answer was not complete within {service.limits.request_seconds:g} s (--request-timeout)"
    return ApiError(504, message, code="timeout")
