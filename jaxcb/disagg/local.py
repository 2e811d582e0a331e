"""LocalLink: a prefill and a decode engine of one process. Pages go from device to device."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxcb.disagg.prompts import PromptService
from jaxcb.engine import Engine
from jaxcb.engine.incoming import FirstToken
from jaxcb.errors import ConfigError, PeerError
from jaxcb.request import Request
from jaxcb.scheduler import TokenEvent

logger = logging.getLogger(__name__)


class LocalLink:
    """The prefill engine as a :class:`jaxcb.engine.incoming.Source` of the decode engine; it is its Receiver too. Both
    have the same weights when it is made."""

    def __init__(self, service: PromptService, decode: Engine):
        """
        Raises:
            ConfigError: an engine was started without ``kv_transfer``, or their pages are not the same.
        """
        decode.handovers.check()
        ours, theirs = (engine.handovers.page_form for engine in (decode, service.engine))
        if ours != theirs:
            raise ConfigError(
                f"the decode engine has pages of {ours}, the prefill engine of {theirs}: start both with the same "
                "page_size, kv_cache_dtype and backend",
                param="page_size",
            )
        self._service, self._handovers = service, decode.handovers
        self._sharding = decode.handovers.page_rows.sharding
        self._num_updates_ahead = service.engine.handovers.num_updates - decode.handovers.num_updates
        """Of the prefill engine's. Both are counted on from here."""
        self._is_broken = False
        self._desk = service.open(self)

    @property
    def address(self) -> None:
        return None

    @property
    def alive(self) -> bool:
        return self._service.works and not self._is_broken

    @property
    def backlog_tokens(self) -> int:
        return self._service.backlog_tokens

    # ------------------------------------------------------------------ to the prefill engine

    def begin(self, request: Request, first_page: int | None) -> None:
        self._desk.begin(request, first_page, self._handovers.num_updates + self._num_updates_ahead)

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
        self._post(lambda: self._handovers.incoming.pages(self, request_id, first_page, num_pages, moved))

    def first_token(self, request_id: str, token: FirstToken) -> None:
        self._post(lambda: self._handovers.incoming.first_token(self, request_id, token))

    def failed(self, request_id: str, reason: str) -> None:
        logger.info("the prompt of %s is computed by the decode engine: %s", request_id, reason)
        self._post(lambda: self._handovers.incoming.take_over(self, request_id))

    def broken(self, reason: str) -> None:
        """Between engines of one process that is a bug, or a device that is full: they go on without each other."""
        logger.error("no more prompts are handed over: %s", reason)
        self._is_broken = True  # whoever watches the links has its requests taken over

    def _post(self, take: Callable[[], Sequence[TokenEvent] | None]) -> None:
        def guarded() -> Sequence[TokenEvent] | None:
            try:
                return take()
            except PeerError as error:
                self.broken(str(error))
                return None

        self._handovers.post(guarded)
