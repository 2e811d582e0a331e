"""The API key: a wrapper around every route that answers prompts, and one with a key of its own for the admin's."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxcb.serve.errors import ApiError, error_response


class RequireApiKey:
    """ASGI middleware: 401 unless the request brings ``Authorization: Bearer <api_key>``, or ``X-API-Key: <api_key>``
    as Anthropic's clients do."""

    def __init__(self, app: ASGIApp, api_key: str):
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if not scheme:
            given = headers.get("x-api-key", "")
        elif scheme.lower() != "bearer":  # in any case (RFC 9110, 11.1)
            given = ""
        # its time does not tell how much of the key was right
        if given and hmac.compare_digest(given.encode("latin-1"), self._key):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401, "The API key is missing or wrong: send Authorization: Bearer <key>", code="invalid_api_key"
        )
        await error_response(error, {"WWW-Authenticate": "Bearer"}, path=scope["path"])(scope, receive, send)
