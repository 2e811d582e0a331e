"""A server that answers /v1/completions by a script, for what a real one does only when it is broken."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake"
Script = Callable[[dict[str, Any]], Sequence[bytes]]
"""A request's fields to the pieces of its answer, each sent by itself."""


def right_answer(fields: dict[str, Any]) -> list[bytes]:
    """As many tokens as asked for, cut into pieces at awkward places: in a line, between two, many in one."""
    text = b"".join([token()] * fields["max_tokens"] + [usage(fields["max_tokens"]), b"data: [DONE]\n\n"])
    return [text[:5], text[5:80], text[80:81], text[81:]]


def token() -> bytes:
    return _event({"choices": [{"index": 0, "text": "x"}], "usage": None})


def usage(num_tokens: int) -> bytes:
    return _event({"choices": [], "usage": {"completion_tokens": num_tokens}})


def error(message: str) -> bytes:
    return _event({"error": {"message": message}})


@contextlib.contextmanager
def fake_server(script: Script, received: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """The URL of a server; the requests that it gets are appended to ``received``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"data": [{"id": MODEL}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if received is not None:
                received.append(fields)
            self.send_response(200 if fields["model"] == MODEL else 404)
            self.end_headers()
            for piece in script(fields):
                self.wfile.write(piece)
                time.sleep(0.01)  # or they arrive together

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"
