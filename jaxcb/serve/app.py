"""The routes, and the ASGI application around them."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route, Router

from jaxcb.parsing import reasoning_markers, tool_format
from jaxcb.serve import chat, chat_answer, completions
from jaxcb.serve.answer import EventStream, answer_beams, answer_whole
from jaxcb.serve.auth import RequireApiKey
from jaxcb.serve.body import read_json_body
from jaxcb.serve.call import Call, Face
from jaxcb.serve.errors import HANDLERS, error_response, stopped
from jaxcb.serve.metrics import Metrics
from jaxcb.serve.responses import ModelCard, ModelList, encode
from jaxcb.serve.service import Service

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from jaxcb.engine import Engine


def make_app(
    engine: Engine,
    *,
    model_names: Sequence[str] = (),
    api_key: str | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> Starlette:
    """The server's application.

    Arguments:
        model_names: names that requests may use for the model; default: the engine's own.
        api_key: what every path under /v1 asks for, if given.
        tool_call_parser, reasoning_parser: names of :mod:`jaxcb.parsing`, "auto" or "none".

    Raises:
        ConfigError: there is no such parser.
    """
    names = tuple(model_names) or (engine.name,)
    v1 = [
        Route("/models", models),
        Route("/models/{name:path}", model),
        Route("/chat/completions", chat_completions, methods=["POST"]),
        Route("/completions", text_completions, methods=["POST"]),
    ]
    guard = [Middleware(RequireApiKey, api_key=api_key)] if api_key is not None else []
    app = Starlette(
        routes=[
            # A route added to the mount can't forget the key.
            Mount("/v1", app=Router(v1, redirect_slashes=False, middleware=guard)),
            Route("/health", health),
            Route("/metrics", metrics),
            Route("/version", version),
        ],
        exception_handlers=HANDLERS,
    )
    app.router.redirect_slashes = False
    template = engine.tokenizer.chat_template
    app.state.service = Service(
        engine=engine,
        model_names=names,
        metrics=Metrics(engine, names[0]),
        tool_format=tool_format(tool_call_parser, template),
        reasoning=reasoning_markers(reasoning_parser, template),
    )
    return app


async def chat_completions(request: Request) -> ASGIApp:
    return await _generate(request, chat.read, chat_answer.FACE)


async def text_completions(request: Request) -> ASGIApp:
    return await _generate(request, completions.read, completions.FACE)


async def models(request: Request) -> Response:
    service = _service(request)
    return _json(ModelList(data=[_card(service, name) for name in service.model_names]))


async def model(request: Request) -> Response:
    service = _service(request)
    name = request.path_params["name"]
    service.check_model(name)
    return _json(_card(service, name))


async def health(request: Request) -> Response:
    if not _service(request).engine.healthy:
        return error_response(stopped())
    return _json({"status": "ok"})


async def metrics(request: Request) -> Response:
    text = await asyncio.to_thread(_service(request).metrics.exposition)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    return _json({"version": _installed_version()})


async def _generate(request: Request, read: Callable[[bytes, Service], Call], face: Face) -> ASGIApp:
    """Read, check and tokenise off the event loop (a long prompt must not stall other streams), submit, answer.

    A refusal happens before the answer begins, so a refused stream too has its own status.
    """
    service = _service(request)
    async with service.reading():
        body = await read_json_body(request)
    call = await asyncio.to_thread(read, body, service)
    if call.beams:
        return await answer_beams(service, face, call, request.receive)
    streams = service.submit(call)
    if call.stream:
        return EventStream(service=service, face=face, call=call, streams=streams)
    return await answer_whole(service, face, call, streams, request.receive)


def _installed_version() -> str:
    try:
        return importlib.metadata.version("jaxcb")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that was never installed


def _service(request: Request) -> Service:
    return request.app.state.service


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, created=service.created, max_model_len=service.max_model_len)


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")
