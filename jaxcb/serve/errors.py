"""Every refusal in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}`` with a fitting status."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from jaxcb.errors import EngineStoppedError, QueueFullError, RequestError

_MAX_CHARS = 500
"""Messages and params quote what the client sent; a body of many megabytes must not come back."""
CLIENT_LEFT_STATUS = 499
ANTHROPIC_PATH = "/v1/messages"


class ApiError(Exception):
    """A request that is answered with an error. ``param`` names the field at fault, if one is."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    @property
    def kind(self) -> str:
        """OpenAI's ``type`` of the error."""
        if self.status == 429:
            return "rate_limit_error"
        return "server_error" if self.status >= 500 else "invalid_request_error"


class ClientLeftError(Exception):
    """The client closed its connection; whatever is answered reaches nobody."""


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(error: ApiError) -> ErrorBody:
    param = None if error.param is None else error.param[:_MAX_CHARS]
    return ErrorBody(ErrorDetail(message=str(error)[:_MAX_CHARS], type=error.kind, param=param, code=error.code))


class AnthropicDetail(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, frozen=True):
    error: AnthropicDetail
    type: str = "error"


_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: ApiError) -> AnthropicErrorBody:
    """The same for the clients of /v1/messages."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    return AnthropicErrorBody(AnthropicDetail(_ANTHROPIC_KINDS.get(error.status, default), str(error)[:_MAX_CHARS]))


def error_response(error: ApiError, headers: Mapping[str, str] | None = None, *, path: str = "") -> Response:
    """``path``: of the request, whose clients expect an error of their own form."""
    anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return Response(
        msgspec.json.encode(anthropic_error(error) if anthropic else error_body(error)),
        status_code=error.status,
        headers=headers,
        media_type="application/json",
    )


def stopped() -> ApiError:
    """The engine takes no work, or dropped what it had. The reason is in the log: it may hold paths."""
    return ApiError(503, "The engine has stopped and answers no requests.", code="engine_stopped")


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, path=request.url.path)


async def on_request_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(ApiError(400, str(error), param=error.param), path=request.url.path)


async def on_queue_full(request: Request, error: Exception) -> Response:
    return error_response(ApiError(429, str(error), code="queue_full"), path=request.url.path)


async def on_engine_stopped(request: Request, error: Exception) -> Response:
    return error_response(stopped(), path=request.url.path)


async def on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT_STATUS)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    where = f"{request.method} {path}"
    if error.status_code == 404:
        return error_response(ApiError(404, f"{where}: there is no such path", code="not_found"), path=path)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{where}: this path takes {allowed} only"
        return error_response(ApiError(405, message, code="method_not_allowed"), error.headers, path=path)
    return error_response(ApiError(error.status_code, f"{where}: {error.detail}"), error.headers, path=path)


async def on_bug(request: Request, error: Exception) -> Response:
    """Anything else is our fault. Starlette raises it again after this answer, so the log has the traceback."""
    message = "Internal error; the server's log has the details."
    return error_response(ApiError(500, message, code="internal_error"), path=request.url.path)


HANDLERS = {
    ApiError: on_api_error,
    RequestError: on_request_error,
    QueueFullError: on_queue_full,
    EngineStoppedError: on_engine_stopped,
    ClientLeftError: on_client_left,
    HTTPException: on_http_exception,
    Exception: on_bug,
}
