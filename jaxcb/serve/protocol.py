"""uvicorn's HTTP protocol with a bound on the head of a request: httptools itself would buffer it without end."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
"""Request line and headers together. Common servers take 8 to 32 KiB."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Answers 400 and closes the connection when a head passes ``MAX_HEAD_BYTES``."""

    _head_bytes = 0
    _in_head = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response(f"The headers must be at most {MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()
