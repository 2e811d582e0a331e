"""PrefillServer: lets decode processes give their prompts to the engine of this one.

A conversation: this side sends ``hello`` (who it is, a nonce), the other ``join`` (who it is, its proof of the secret,
a nonce), this side ``welcome`` (its proof, a session's name, what the connector offers) or ``refused``; the other side
opens its end of the connector and sends ``joined``. Then orders come in and parcels go out, as in
:class:`jaxcb.disagg.prompts.PromptDesk`, with a ``beat`` from each side now and then.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import secrets
import socket
import threading
import time
from typing import Any

from jaxcb.disagg import messages
from jaxcb.disagg.connector import KVConnector, KVSender
from jaxcb.disagg.fields import Fields
from jaxcb.disagg.identity import difference, is_proof, proof
from jaxcb.disagg.prompts import PromptDesk, PromptService
from jaxcb.disagg.wire import MAX_STRANGERS, Channel
from jaxcb.engine.incoming import FirstToken
from jaxcb.errors import ConfigError, JaxcbError, PeerError, RequestError
from jaxcb.step.page_mover import PAGES_PER_MOVE

logger = logging.getLogger(__name__)

BEAT_S = 1.0
RETRY_S = 0.1
"""Between two tries to accept a connection where that fails."""
MAX_PAGE = 1 << 31
"""A number of a page in a prompt, as far as one can tell before the prompt is known."""
SILENCE_S = 10.0
"""A side that says nothing for so long is dead; one that is killed is known to be at once."""


class PrefillServer:
    """Listens from the start; :meth:`close` ends it. Meanwhile the engine keeps its weights.

    Arguments:
        identity: as of :func:`jaxcb.disagg.identity.identity_of`.
        address: host and port; port 0 takes a free one.
        secret: what the other side must know too; empty: nothing, on an address that only this machine reaches.

    Raises:
        ConfigError: the address can't be listened on.
    """

    def __init__(
        self,
        service: PromptService,
        identity: dict[str, str],
        connector: KVConnector,
        address: tuple[str, int],
        *,
        secret: str = "",
        silence_s: float = SILENCE_S,
    ):
        check_secret(address[0], secret)
        self._service, self._identity, self._connector = service, identity, connector
        self._secret, self._silence_s = secret, silence_s
        try:
            family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
            self._sock = socket.create_server(address, family=family)
        except OSError as error:
            raise ConfigError(
                f"can't listen on {address[0]} port {address[1]}: {error.strerror or error}. Choose another with "
                "--kv-listen",
                param="kv_listen",
            ) from error
        self.address: tuple[str, int] = self._sock.getsockname()[:2]
        self._channels: dict[Channel, threading.Thread] = {}
        """Of every connection, with the thread that serves it."""
        self._num_peers = 0
        self._lock = threading.Lock()
        self._closed = False
        service.engine.handovers.keep_weights(self)
        self._thread = threading.Thread(target=self._accept, name="jaxcb-kv-listen", daemon=True)
        self._thread.start()

    @property
    def num_peers(self) -> int:
        """Decode processes that are connected."""
        return self._num_peers

    def close(self) -> None:
        """Refuse new connections and end those there are: their requests are computed elsewhere. The port is free."""
        with self._lock:
            self._closed = True
            connections = dict(self._channels)
        with contextlib.suppress(OSError):  # not every system lets a listening socket be shut down
            self._sock.shutdown(socket.SHUT_RDWR)  # accept() returns
        self._sock.close()
        for channel in connections:
            channel.close()
        for thread in (self._thread, *connections.values()):
            thread.join()
        self._service.engine.handovers.let_weights_go(self)

    def _accept(self) -> None:
        while True:
            try:
                sock, where = self._sock.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("a connection can't be accepted: %s", error)  # of files there are too many, say
                time.sleep(RETRY_S)
                continue
            channel = Channel(sock, self._silence_s)
            thread = threading.Thread(target=self._serve, args=(channel, where), name="jaxcb-kv-session", daemon=True)
            with self._lock:
                if self._closed or len(self._channels) - self._num_peers >= MAX_STRANGERS:
                    channel.close()
                    continue
                try:
                    thread.start()
                except RuntimeError as error:  # there are too many
                    logger.warning("a connection can't be served: %s", error)
                    channel.close()
                    continue
                self._channels[channel] = thread

    def _serve(self, channel: Channel, where: Any) -> None:
        try:
            nonce = self._check(channel)
            sender = self._connector.sender(self._service.engine.handovers.page_rows)
            try:
                self._run(channel, sender, nonce, where)
            finally:
                sender.close()
        except JaxcbError as error:
            logger.warning("the decode engine at %s: %s", where, error)
        except Exception:
            logger.exception("the connection of the decode engine at %s", where)
        finally:
            channel.close()
            with self._lock:
                del self._channels[channel]

    def _check(self, channel: Channel) -> str:
        """Know the other side, or refuse it; its nonce."""
        nonce = secrets.token_hex(16)
        channel.send({"kind": "hello", "identity": self._identity, "nonce": nonce})
        join, _ = channel.receive(from_stranger=True)
        fields = Fields(join)
        if fields.text("kind") != "join":
            raise PeerError(f"it said {fields.text('kind')!r} where it should join")
        reason = difference(self._identity, fields.part("identity"))
        if self._secret and not is_proof(fields.text("proof"), self._secret, nonce):
            reason = "it doesn't know the secret: give both sides the same --kv-secret"
        if reason is not None:
            channel.send({"kind": "refused", "reason": reason})
            raise PeerError(f"refused: {reason}")
        return fields.text("nonce")

    def _run(self, channel: Channel, sender: KVSender, nonce: str, where: Any) -> None:
        session = _Session(self._service, channel, sender, where)
        channel.send(
            {
                "kind": "welcome",
                "proof": proof(self._secret, nonce),
                "session": session.name,
                "offer": sender.offer,
            }
        )
        joined, _ = channel.receive(from_stranger=True)
        if joined.get("kind") != "joined":
            raise PeerError(f"it couldn't take up what the connector offers: {joined.get('reason')}")
        sender.welcomed()
        logger.info("a decode engine at %s gives its prompts here", where)
        with self._lock:
            self._num_peers += 1
        try:
            session.run()
        finally:
            with self._lock:
                self._num_peers -= 1


class _Session:
    """With one decode process; the Receiver of its desk."""

    def __init__(self, service: PromptService, channel: Channel, sender: KVSender, where: Any):
        self._service, self.channel, self._sender, self._where = service, channel, sender, where
        self.name = secrets.token_hex(8)

    def run(self) -> None:
        """Until the connection ends."""
        desk = self._service.open(self)
        stopped = threading.Event()
        beats = threading.Thread(target=self._beat, args=(stopped,), name="jaxcb-kv-beat", daemon=True)
        try:
            beats.start()
            while True:
                message, body = self.channel.receive()
                if message.get("session") != self.name:
                    continue  # of a connection that ended
                self._order(desk, Fields(message), body)
        finally:
            stopped.set()
            self.channel.close()
            desk.close()
            if beats.is_alive():
                beats.join()

    def _order(self, desk: PromptDesk, message: Fields, body: bytes) -> None:
        """Raises PeerError if it is none."""
        kind = message.text("kind")
        if kind == "begin":
            first_page = message.integer("first_page", 0, MAX_PAGE) if message.has("first_page") else None
            request = Fields(message.part("request"))
            try:
                desk.begin(messages.unpack_request(request, body), first_page)
            except RequestError as error:
                self.failed(request.text("id"), str(error))
        elif kind == "grant":
            desk.grant(message.text("id"), message.integer("first_page", 0, MAX_PAGE))
        elif kind == "received":
            desk.received(message.text("id"), message.integer("num_pages", 1, PAGES_PER_MOVE))
        elif kind == "drop":
            desk.drop(message.text("id"))
        elif kind != "beat":
            raise PeerError(f"it sent {kind!r}, which means nothing")

    def _beat(self, stopped: threading.Event) -> None:
        while not stopped.wait(BEAT_S):
            self._tell("beat", {"backlog_tokens": self._service.backlog_tokens, "works": self._service.works})

    # ------------------------------------------------------------------ parcels

    def pages(self, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """See :class:`jaxcb.disagg.prompts.Receiver`."""
        ticket = self._sender.send(rows, num_pages)
        self._tell("pages", {"id": request_id, "first_page": first_page, "num_pages": num_pages, "ticket": ticket})

    def first_token(self, request_id: str, token: FirstToken) -> None:
        fields, body = messages.pack_token(token)
        self._tell("first_token", {"id": request_id, "token": fields}, body)

    def failed(self, request_id: str, reason: str) -> None:
        self._tell("failed", {"id": request_id, "reason": reason})

    def broken(self, reason: str) -> None:
        logger.warning("the decode engine at %s: %s", self._where, reason)
        self.channel.close()  # whoever receives sees it, and ends the session

    def _tell(self, kind: str, fields: dict[str, Any], body: bytes = b"") -> None:
        try:
            self.channel.send({"kind": kind, **fields}, body)
        except PeerError as error:
            logger.debug("%s to the decode engine at %s: %s", kind, self._where, error)
            self.channel.close()  # as above: what it waits for never comes


def check_secret(host: str, secret: str) -> None:
    """Raise ConfigError where a secret is needed: on an address that others than this machine reach."""
    if secret or host == "localhost" or _is_loopback(host):
        return
    raise ConfigError(
        f"--kv-listen {host} is reached by other machines: without --kv-secret (better: JAXCB_KV_SECRET) anyone there "
        "could give this engine prompts, and learn of those of others by the time that they take. Give both sides a "
        "secret, or listen on 127.0.0.1",
        param="kv_secret",
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False
