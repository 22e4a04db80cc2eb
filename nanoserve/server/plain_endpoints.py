"""The endpoints that generate nothing."""

from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from nanoserve import __version__
from nanoserve.server.api_errors import ApiError, JsonResponse
from nanoserve.server.bodies import read_json_body
from nanoserve.server.engine_client import EngineState
from nanoserve.server.sampling import check_token_ids
from nanoserve.server.schemas import DetokenizeRequest, TokenizeRequest, parse
from nanoserve.server.service import Service


def _service(http: HttpRequest) -> Service:
    service: Service = http.app.state.service
    return service


async def models(http: HttpRequest) -> Response:
    """``GET /v1/models``"""
    return JsonResponse({"object": "list", "data": [_model_card(_service(http))]})


async def model(http: HttpRequest) -> Response:
    """``GET /v1/models/{name}``"""
    service = _service(http)
    service.check_model(http.path_params["name"])
    return JsonResponse(_model_card(service))


def _model_card(service: Service) -> dict[str, Any]:
    facts = service.engine.facts
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "nanoserve",
        "root": service.root,
        "max_model_len": facts.max_model_len if facts else None,
    }


async def health(http: HttpRequest) -> Response:
    """``GET /health``: whether the server should be left alone; it answers 503 when its engine keeps failing."""
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


async def tokenize(http: HttpRequest) -> Response:
    """``POST /tokenize``: the token ids of a text or of a conversation, as the model would see them."""
    service = _service(http)
    asked = parse(await read_json_body(http, service.limits), TokenizeRequest)
    service.check_model(asked.model)
    if (asked.prompt is None) == (asked.messages is None):
        raise ApiError(400, "give prompt or messages, one of them", code="invalid_value")
    if asked.messages is not None:
        tokens = await service.encode_chat(asked.messages, add_generation_prompt=asked.add_generation_prompt)
    else:
        tokens = await service.encode(asked.prompt or "", add_special_tokens=asked.add_special_tokens)
    facts = service.engine.facts
    length = facts.max_model_len if facts else None
    return JsonResponse({"count": len(tokens), "max_model_len": length, "tokens": tokens})


async def detokenize(http: HttpRequest) -> Response:
    """``POST /detokenize``: the text of token ids, control tokens and all."""
    service = _service(http)
    asked = parse(await read_json_body(http, service.limits), DetokenizeRequest)
    service.check_model(asked.model)
    facts = service.facts()
    check_token_ids(asked.tokens, facts, "tokens")
    if len(asked.tokens) > facts.max_model_len:
        message = f"{len(asked.tokens)} tokens; at most the {facts.max_model_len} of a context are taken"
        raise ApiError(400, message, code="context_length_exceeded", param="tokens")
    return JsonResponse({"prompt": await service.decode(asked.tokens)})
