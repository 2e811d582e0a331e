"""The ASGI application: the routes of the table, behind the keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route, Router

from jaxcb.parsing import reasoning_markers, tool_format
from jaxcb.serve import openapi
from jaxcb.serve.auth import RequireApiKey
from jaxcb.serve.endpoints import ENDPOINTS, Endpoint
from jaxcb.serve.errors import HANDLERS
from jaxcb.serve.metrics import Metrics
from jaxcb.serve.responses import json_response
from jaxcb.serve.service import Service

if TYPE_CHECKING:
    from jaxcb.engine import ServingEngine


def make_app(
    engine: ServingEngine,
    *,
    model_names: Sequence[str] = (),
    api_key: str | None = None,
    admin_api_key: str | None = None,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
    allowed_origins: Sequence[str] = (),
) -> Starlette:
    """The server's application.

    Arguments:
        model_names: names that requests may use for the model; default: the engine's own.
        api_key: what every path that takes prompts asks for, if given.
        admin_api_key: opens the admin's routes; without it there are none.
        tool_call_parser, reasoning_parser: names of :mod:`jaxcb.parsing`, "auto" or "none".
        allowed_origins: web pages that may ask ("*": all).

    Raises:
        ConfigError: there is no such parser.
    """
    names = tuple(model_names) or (engine.name,)
    served = [one for one in ENDPOINTS if one.key != "admin" or admin_api_key is not None]
    keys = {"none": None, "api": api_key, "admin": admin_api_key}
    v1 = [_route(one, None, prefix="/v1") for one in served if one.path.startswith("/v1/")]
    others = [_route(one, keys[one.key]) for one in served if not one.path.startswith("/v1/")]
    # A route added to the mount can't forget the key.
    guarded = Router(v1, redirect_slashes=False, middleware=_guard(api_key))
    routes: list[BaseRoute] = [Mount("/v1", app=guarded), *others, Route("/openapi.json", _openapi)]
    cors = [Middleware(CORSMiddleware, allow_origins=list(allowed_origins), allow_methods=["*"], allow_headers=["*"])]
    app = Starlette(routes=routes, exception_handlers=HANDLERS, middleware=cors if allowed_origins else [])
    app.router.redirect_slashes = False
    template = engine.tokenizer.chat_template
    app.state.endpoints = served
    app.state.service = Service(
        engine=engine,
        model_names=names,
        metrics=Metrics(engine, names[0]),
        tool_format=tool_format(tool_call_parser, template),
        reasoning=reasoning_markers(reasoning_parser, template),
    )
    return app


async def _openapi(request: Request) -> Response:
    return json_response(openapi.document(request.app.state.endpoints))


def _route(endpoint: Endpoint, key: str | None, prefix: str = "") -> Route:
    path = endpoint.path.removeprefix(prefix)
    return Route(path, endpoint.handler, methods=[endpoint.method], middleware=_guard(key))


def _guard(key: str | None) -> list[Middleware]:
    return [] if key is None else [Middleware(RequireApiKey, api_key=key)]
