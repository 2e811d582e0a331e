"""The API key: a wrapper around every /v1 route."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxcb.serve.errors import ApiError, error_response


class RequireApiKey:
    """ASGI middleware: 401 unless the request brings ``Authorization: Bearer <api_key>``."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, self._expected):  # its time does not tell how much of the key was right
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "The API key is missing or wrong: send Authorization: Bearer <key>", code="invalid_api_key"
        )
        await error_response(error, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
