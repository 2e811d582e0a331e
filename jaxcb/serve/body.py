"""Reads the body of a POST: content type, size, nothing more."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from jaxcb.serve.errors import ApiError, ClientLeftError

MAX_BODY_BYTES = 16 * 1024 * 1024
"""Largest accepted body: about two million token ids, or a prompt far beyond any context limit."""
_FORMS = ("application/x-www-form-urlencoded", "multipart/form-data")


async def read_json_body(request: Request) -> bytes:
    """The raw body of a request that says it is JSON.

    The content type is required: browsers send any other type across sites without asking, so a web page could make
    a server on the user's own machine work.

    Raises:
        ApiError: 415 or (forms) 400 for another content type, 413 above ``MAX_BODY_BYTES``.
        ClientLeftError: the client went before the body was complete.
    """
    _check_content_type(request.headers.get("content-type"))
    _check_size(_content_length(request))
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            _check_size(len(body))
    except ClientDisconnect as error:
        raise ClientLeftError from error
    return bytes(body)


def _check_content_type(content_type: str | None) -> None:
    media_type = (content_type or "").partition(";")[0].strip().lower()
    if media_type == "application/json":
        return
    given = repr(media_type) if media_type else "none"
    message = f"Content-Type must be application/json, got {given}"
    raise ApiError(400 if media_type in _FORMS else 415, message, code="unsupported_media_type")


def _content_length(request: Request) -> int:
    """0 for a chunked body: its size is checked while it arrives."""
    value = request.headers.get("content-length", "0")
    return int(value) if value.isascii() and value.isdigit() else 0


def _check_size(num_bytes: int) -> None:
    if num_bytes > MAX_BODY_BYTES:
        raise ApiError(413, f"The body must be at most {MAX_BODY_BYTES} bytes", code="body_too_large")
