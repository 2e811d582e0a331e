"""PrefillServer: lets decode processes give their prompts to the engine of this one.

A conversation: this side sends ``hello`` (who it is, a nonce), the other ``join`` (who it is, its proof of the secret,
a nonce), this side ``welcome`` (its proof, a session's name, what the connector offers) or ``refused``; the other side
opens its end of the connector and sends ``joined``. Then orders come in and parcels go out, as in
:class:`jaxcb.disagg.prompts.PromptDesk`, with a ``beat`` from each side now and then.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from typing import Any

from jaxcb.disagg import messages
from jaxcb.disagg.connector import KVConnector, KVSender
from jaxcb.disagg.identity import difference, proof
from jaxcb.disagg.prompts import PromptDesk, PromptService
from jaxcb.disagg.wire import Channel, PeerError
from jaxcb.engine.incoming import FirstToken
from jaxcb.errors import ConfigError, JaxcbError

logger = logging.getLogger(__name__)

BEAT_S = 1.0
SILENCE_S = 10.0
"""A side that says nothing for so long is dead; one that is killed is known to be at once."""


class PrefillServer:
    """Listens from the start; :meth:`close` ends it.

    Arguments:
        identity: as of :func:`jaxcb.disagg.identity.identity_of`.
        address: host and port; port 0 takes a free one.
        secret: what the other side must know too; empty: nothing.

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
        self._sessions: set[_Session] = set()
        self._lock = threading.Lock()
        self._closed = False
        threading.Thread(target=self._accept, name="jaxcb-kv-listen", daemon=True).start()

    @property
    def num_peers(self) -> int:
        """Decode processes that are connected."""
        return len(self._sessions)

    def close(self) -> None:
        """Refuse new connections and end those there are: their requests are computed elsewhere."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        self._sock.close()
        for session in sessions:
            session.channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, where = self._sock.accept()
            except OSError:
                return  # closed
            channel = Channel(sock, self._silence_s)
            threading.Thread(target=self._serve, args=(channel, where), name="jaxcb-kv-session", daemon=True).start()

    def _serve(self, channel: Channel, where: Any) -> None:
        try:
            nonce = self._check(channel)
            sender = self._connector.sender(self._service.engine.page_rows)
            try:
                self._run(channel, sender, nonce, where)
            finally:
                sender.close()
        except (JaxcbError, ValueError, KeyError, TypeError) as error:
            logger.warning("the decode engine at %s: %s", where, error)
        finally:
            channel.close()

    def _check(self, channel: Channel) -> str:
        """Know the other side, or refuse it; its nonce."""
        nonce = secrets.token_hex(16)
        channel.send({"kind": "hello", "identity": self._identity, "nonce": nonce})
        join, _ = channel.receive()
        if join.get("kind") != "join":
            raise PeerError(f"it said {join.get('kind')!r} where it should join")
        reason = difference(self._identity, dict(join["identity"]))
        if self._secret and not hmac.compare_digest(proof(self._secret, nonce), str(join["proof"])):
            reason = "it doesn't know the secret: give both sides the same --kv-secret"
        if reason is not None:
            channel.send({"kind": "refused", "reason": reason})
            raise PeerError(f"refused: {reason}")
        return str(join["nonce"])

    def _run(self, channel: Channel, sender: KVSender, nonce: str, where: Any) -> None:
        session = _Session(self._service, channel, sender)
        channel.send(
            {
                "kind": "welcome",
                "proof": proof(self._secret, nonce),
                "session": session.name,
                "offer": sender.offer,
            }
        )
        joined, _ = channel.receive()
        if joined.get("kind") != "joined":
            raise PeerError(f"it couldn't take up what the connector offers: {joined.get('reason')}")
        sender.welcomed()
        with self._lock:
            if self._closed:
                return
            self._sessions.add(session)
        logger.info("a decode engine at %s gives its prompts here", where)
        try:
            session.run()
        finally:
            with self._lock:
                self._sessions.discard(session)


class _Session:
    """With one decode process; the Receiver of its desk."""

    def __init__(self, service: PromptService, channel: Channel, sender: KVSender):
        self._service, self.channel, self._sender = service, channel, sender
        self.name = secrets.token_hex(8)

    def run(self) -> None:
        """Until the connection ends."""
        desk = self._service.open(self)
        stopped = threading.Event()
        beats = threading.Thread(target=self._beat, args=(stopped,), name="jaxcb-kv-beat", daemon=True)
        beats.start()
        try:
            while True:
                message, body = self.channel.receive()
                if message.get("session") != self.name:
                    continue  # of a connection that ended
                self._order(desk, message, body)
        finally:
            stopped.set()
            self.channel.close()
            desk.close()
            beats.join()

    def _order(self, desk: PromptDesk, message: dict[str, Any], body: bytes) -> None:
        kind, request_id = message["kind"], message.get("id", "")
        if kind == "begin":
            desk.begin(messages.unpack_request(message["request"], body), message["first_page"])
        elif kind == "grant":
            desk.grant(request_id, int(message["first_page"]))
        elif kind == "received":
            desk.received(request_id, int(message["num_pages"]))
        elif kind == "drop":
            desk.drop(request_id)
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

    def _tell(self, kind: str, fields: dict[str, Any], body: bytes = b"") -> None:
        try:
            self.channel.send({"kind": kind, **fields}, body)
        except PeerError:
            self.channel.close()  # whoever receives sees it, and ends the session
