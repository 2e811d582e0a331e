"""GET routes that tell of the server: its models, its health, its load, its metrics."""

from __future__ import annotations

import asyncio
import importlib.metadata

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from jaxcb.serve.errors import ApiError, error_response, stopped
from jaxcb.serve.responses import ModelCard, ModelList, json_response
from jaxcb.serve.service import Service


class Status(msgspec.Struct, frozen=True):
    status: str


class Health(msgspec.Struct, frozen=True):
    """``status`` is "ok", or "degraded" where some of several engines don't work; ``engines``: the state of each. Those
    that only compute prompts, for others, are called prefill, and those in other processes go by their address."""

    status: str
    engines: dict[str, str]


class Version(msgspec.Struct, frozen=True):
    version: str


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """``server_load`` is vLLM's name of the requests that are here."""

    server_load: int
    num_running: int
    num_waiting: int
    kv_cache_usage: float
    """Part of the KV pages that requests hold, 0 to 1."""


async def models(request: Request) -> Response:
    service = _service(request)
    return json_response(ModelList(data=[_card(service, name) for name in service.model_names]))


async def model(request: Request) -> Response:
    service = _service(request)
    name = request.path_params["name"]
    service.check_model(name)
    return json_response(_card(service, name))


async def health(request: Request) -> Response:
    """Liveness: whether a restart would help at once. While one of several engines works, requests are answered, and a
    restart would drop them: 200, and "degraded" tells of the others. 503 when none works: each has failed, or has work
    and made no step for a minute (vllm#17972: a hang with /health at 200)."""
    engine = _service(request).engine
    if not engine.healthy:
        return error_response(stopped())
    parts = engine.stats_by_engine()
    states: dict[str, str] = {name: stats.state for name, stats in parts.items()}
    if not any(stats.answers and stats.state == "ok" for stats in parts.values()):
        stalled_s = engine.stats().stalled_s
        message = f"There is work, and no step was done for {stalled_s:.0f} seconds."
        return error_response(ApiError(503, message, code="engine_stalled"))
    states |= {f"prefill at {address}": "ok" if alive else "lost" for address, alive in engine.peers.items()}
    if len(states) == 1:
        return json_response(Status("ok"))
    return json_response(Health("ok" if set(states.values()) == {"ok"} else "degraded", states))


async def ready(request: Request) -> Response:
    """Readiness: whether requests should be sent here. (Before the warm-up is done nobody listens at all.)"""
    engine = _service(request).engine
    if not engine.healthy or not engine.accepting:
        return error_response(stopped())
    if engine.paused:
        return error_response(ApiError(503, "The engine is paused.", code="engine_paused"))
    return json_response(Status("ready"))


async def load(request: Request) -> Response:
    stats = _service(request).engine.stats()
    return json_response(
        Load(
            server_load=stats.num_running + stats.num_waiting,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_pages_used / stats.kv_pages_total,
        )
    )


async def metrics(request: Request) -> Response:
    text = await asyncio.to_thread(_service(request).metrics.exposition)
    return Response(text, media_type=CONTENT_TYPE_LATEST)


async def version(request: Request) -> Response:
    return json_response(Version(installed_version()))


def installed_version() -> str:
    try:
        return importlib.metadata.version("jaxcb")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"  # run from a source tree that was never installed


def _service(request: Request) -> Service:
    return request.app.state.service


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(id=name, root=service.engine.name, created=service.created, max_model_len=service.max_model_len)
