"""LocalLink: a prefill and a decode engine of one process. Pages go from device to device."""

from __future__ import annotations

from typing import Any

import jax

from jaxcb.disagg.prompts import PromptService
from jaxcb.engine import Engine
from jaxcb.engine.incoming import FirstToken
from jaxcb.request import Request


class LocalLink:
    """The prefill engine as a :class:`jaxcb.engine.incoming.Source` of the decode engine; it is its Receiver too."""

    is_here = True

    def __init__(self, service: PromptService, decode: Engine):
        self._service, self._decode = service, decode
        self._sharding = decode.page_rows.sharding
        self._desk = service.open(self)

    @property
    def alive(self) -> bool:
        return self._service.works

    @property
    def backlog_tokens(self) -> int:
        return self._service.backlog_tokens

    # ------------------------------------------------------------------ to the prefill engine

    def begin(self, request: Request, first_page: int | None) -> None:
        self._desk.begin(request, first_page)

    def grant(self, request_id: str, first_page: int) -> None:
        self._desk.grant(request_id, first_page)

    def received(self, request_id: str, num_pages: int) -> None:
        self._desk.received(request_id, num_pages)

    def drop(self, request_id: str) -> None:
        self._desk.drop(request_id)

    def close(self) -> None:
        """The decode engine wants no more."""
        self._desk.close()

    # ------------------------------------------------------------------ to the decode engine

    def pages(self, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """Ready when they are posted: no step of the decode engine is to wait for the prefill engine's."""
        moved = jax.device_put(rows, self._sharding)
        moved.block_until_ready()
        self._decode.post(lambda: self._decode.incoming.pages(self, request_id, first_page, num_pages, moved))

    def first_token(self, request_id: str, token: FirstToken) -> None:
        self._decode.post(lambda: self._decode.incoming.first_token(self, request_id, token))

    def failed(self, request_id: str, reason: str) -> None:
        self._decode.post(lambda: self._decode.incoming.take_over(self, request_id))
