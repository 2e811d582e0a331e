"""RemoteLink: a prefill engine in another process, as its decode engine sees it. ``server.py`` is the other end."""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from typing import Any

from jaxcb.disagg import messages
from jaxcb.disagg.connector import KVConnector, KVReceiver
from jaxcb.disagg.identity import difference, proof
from jaxcb.disagg.postbox import Postbox
from jaxcb.disagg.server import BEAT_S, SILENCE_S
from jaxcb.disagg.wire import Channel, PeerError
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError, JaxcbError
from jaxcb.request import Request

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
RECONNECT_S = 1.0


class RemoteLink:
    """Connects when it is made. When the other side dies, what it had is computed by the decode engine, and the link
    tries again until it is back.

    Arguments:
        identity: as of :func:`jaxcb.disagg.identity.identity_of`.

    Raises:
        ConfigError: nobody is there, or it is one that doesn't fit; the message says why.
    """

    is_here = False

    def __init__(
        self,
        decode: Engine,
        identity: dict[str, str],
        connector: KVConnector,
        address: tuple[str, int],
        *,
        secret: str = "",
        silence_s: float = SILENCE_S,
    ):
        self._decode, self._identity, self._connector, self._address = decode, identity, connector, address
        self._secret, self._silence_s = secret, silence_s
        self._open: dict[str, int] = {}  # request -> tokens of its prompt, until its first token is here
        self._reported_tokens, self._works = 0, True
        self._stopping = threading.Event()
        self._session: _Session | None = self._connect()
        self._orders = Postbox("jaxcb-kv-orders", self._order_failed)
        self._thread = threading.Thread(target=self._run, name="jaxcb-kv-peer", daemon=True)
        self._thread.start()
        threading.Thread(target=self._beat, name="jaxcb-kv-beat", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._session is not None and self._works

    @property
    def backlog_tokens(self) -> int:
        return max(self._reported_tokens, sum(list(self._open.values())))

    def close(self) -> None:
        self._stopping.set()
        session = self._session
        if session is not None:
            session.channel.close()
        self._thread.join()
        self._orders.close()

    # ------------------------------------------------------------------ orders, as of a Source

    def begin(self, request: Request, first_page: int | None) -> None:
        self._open[request.request_id] = len(request.prompt_token_ids)
        self._orders.put(lambda: self._begin(request, first_page))

    def grant(self, request_id: str, first_page: int) -> None:
        self._tell("grant", {"id": request_id, "first_page": first_page})

    def received(self, request_id: str, num_pages: int) -> None:
        self._tell("received", {"id": request_id, "num_pages": num_pages})

    def drop(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._tell("drop", {"id": request_id})

    def _begin(self, request: Request, first_page: int | None) -> None:
        session = self._session
        try:
            if session is None:
                raise PeerError("there is no connection")
            fields, body = messages.pack_request(request)
            session.tell("begin", {"request": fields, "first_page": first_page}, body)
        except (PeerError, TypeError, ValueError) as error:
            self._give_up(request.request_id, str(error))

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """To whom the connection goes to now: to another one later it means nothing."""
        session = self._session
        if session is not None:
            self._orders.put(lambda: session.tell(kind, fields))

    def _order_failed(self, error: Exception) -> None:
        """Whoever receives finds it out too, and deals with it."""
        logger.debug("%s: %s", self._address, error)

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT_S):
            self._tell("beat", {})

    # ------------------------------------------------------------------ parcels

    def _run(self) -> None:
        """Receive; connect again when that ends."""
        while not self._stopping.is_set():
            session = self._session
            if session is None:
                self._stopping.wait(RECONNECT_S)
                if not self._stopping.is_set():
                    self._reconnect()
                continue
            try:
                while True:
                    self._parcel(session, *session.channel.receive())
            except (JaxcbError, ValueError, KeyError, TypeError) as error:
                self._lost(session, error)
        if self._session is not None:
            self._lost(self._session, PeerError("closed"))

    def _parcel(self, session: _Session, message: dict[str, Any], body: bytes) -> None:
        kind, request_id, incoming = message["kind"], message.get("id", ""), self._decode.incoming
        if kind == "pages":
            first_page, num_pages = int(message["first_page"]), int(message["num_pages"])
            rows = session.receiver.take(message["ticket"], num_pages)
            self._decode.post(lambda: self._pages(session, request_id, first_page, num_pages, rows))
        elif kind == "first_token":
            token = messages.unpack_token(message["token"], body)
            self._open.pop(request_id, None)
            self._decode.post(lambda: incoming.first_token(self, request_id, token))
        elif kind == "failed":
            self._give_up(request_id, str(message["reason"]))
        elif kind == "beat":
            self._reported_tokens, self._works = int(message["backlog_tokens"]), bool(message["works"])
        else:
            raise PeerError(f"it sent {kind!r}, which means nothing")

    def _pages(self, session: _Session, request_id: str, first_page: int, num_pages: int, rows: Any) -> None:
        """On the engine's thread. Of a connection that has ended nothing may be acknowledged to the next one."""
        if session is self._session:
            self._decode.incoming.pages(self, request_id, first_page, num_pages, rows)

    def _give_up(self, request_id: str, reason: str) -> None:
        logger.info("the prompt of %s is computed here: %s", request_id, reason)
        self._open.pop(request_id, None)
        self._decode.post(lambda: self._decode.incoming.take_over(self, request_id))

    def _lost(self, session: _Session, error: Exception) -> None:
        self._session = None
        session.channel.close()
        session.receiver.close()
        self._open.clear()
        self._reported_tokens, self._works = 0, True
        if not self._stopping.is_set():
            logger.warning("the prefill engine at %s:%d is lost: %s", *self._address, error)
        self._decode.post(lambda: self._decode.incoming.take_over(self))

    # ------------------------------------------------------------------ connecting

    def _reconnect(self) -> None:
        try:
            self._session = self._connect()
            logger.warning("the prefill engine at %s:%d is back", *self._address)
        except ConfigError as error:
            logger.debug("%s", error)

    def _connect(self) -> _Session:
        host, port = self._address
        try:
            channel = Channel(socket.create_connection(self._address, timeout=CONNECT_S), self._silence_s)
        except OSError as error:
            raise ConfigError(
                f"no prefill engine can be reached at {host}:{port}: {error}. Start it first, with --kv-role prefill",
                param="kv_peer",
            ) from error
        try:
            return self._join(channel)
        except (PeerError, KeyError, TypeError, ValueError) as error:
            channel.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the prefill engine at {host}:{port}: {error}", param="kv_peer") from error

    def _join(self, channel: Channel) -> _Session:
        hello, _ = channel.receive()
        if hello.get("kind") != "hello":
            raise PeerError(f"it said {hello.get('kind')!r} first")
        nonce = secrets.token_hex(16)
        theirs = proof(self._secret, str(hello["nonce"]))
        channel.send({"kind": "join", "identity": self._identity, "proof": theirs, "nonce": nonce})
        if (reason := difference(self._identity, dict(hello["identity"]))) is not None:
            raise PeerError(reason)
        welcome, _ = channel.receive()
        if welcome.get("kind") != "welcome":
            raise PeerError(str(welcome.get("reason")))
        if self._secret and not hmac.compare_digest(proof(self._secret, nonce), str(welcome["proof"])):
            raise PeerError("it doesn't know the secret: give both sides the same --kv-secret")
        try:
            receiver = self._connector.receiver(dict(welcome["offer"]), self._decode.page_rows)
        except ConfigError as error:
            channel.send({"kind": "not joined", "reason": str(error)})
            raise
        channel.send({"kind": "joined"})
        return _Session(channel, receiver, str(welcome["session"]))


class _Session:
    """One connection, from its welcome to its end."""

    def __init__(self, channel: Channel, receiver: KVReceiver, name: str):
        self.channel, self.receiver, self._name = channel, receiver, name

    def tell(self, kind: str, fields: dict[str, Any], body: bytes = b"") -> None:
        self.channel.send({"kind": kind, "session": self._name, **fields}, body)
