"""RemoteLink: a prefill engine in another process, as its decode engine sees it. ``server.py`` is the other end."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxcb.disagg import messages
from jaxcb.disagg.connector import KVConnector, KVReceiver
from jaxcb.disagg.fields import Fields
from jaxcb.disagg.identity import difference, is_proof, proof
from jaxcb.disagg.postbox import Postbox
from jaxcb.disagg.server import BEAT_S, MAX_PAGE, SILENCE_S
from jaxcb.disagg.wire import Channel
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError, PeerError, RequestError
from jaxcb.request import Request
from jaxcb.scheduler import TokenEvent
from jaxcb.step.page_mover import PAGES_PER_MOVE

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
_MAX_TOKENS = 1 << 62
RECONNECT_S = 1.0


class RemoteLink:
    """Connects when it is made. When the other side dies, or says what makes no sense, what it had is computed by the
    decode engine, and the link tries again until it is back. Meanwhile the engine keeps its weights.

    Arguments:
        identity: as of :func:`jaxcb.disagg.identity.identity_of`.

    Raises:
        ConfigError: nobody is there, or it is one that doesn't fit; the message says why.
    """

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
        self._why_not = ""
        """The last try to connect again failed for this reason."""
        self._channel: Channel | None = None
        """Of the newest connection, from its first message on."""
        self._session: _Session | None = self._connect()
        decode.handovers.keep_weights(self)
        self._orders = Postbox("jaxcb-kv-orders", self._order_failed)
        self._thread = threading.Thread(target=self._run, name="jaxcb-kv-peer", daemon=True)
        self._thread.start()
        threading.Thread(target=self._beat, name="jaxcb-kv-beat", daemon=True).start()

    @property
    def address(self) -> str:
        host, port = self._address
        return f"{host}:{port}"

    @property
    def alive(self) -> bool:
        return self._session is not None and self._works

    @property
    def backlog_tokens(self) -> int:
        return max(self._reported_tokens, sum(list(self._open.values())))

    def close(self) -> None:
        self._stopping.set()
        if self._channel is not None:
            self._channel.close()
        self._thread.join()
        self._orders.close()
        self._decode.handovers.let_weights_go(self)

    # ------------------------------------------------------------------ orders, as of a Source

    def begin(self, request: Request, first_page: int | None) -> None:
        self._open[request.request_id] = len(request.prompt_token_ids)
        session = self._session  # as for _tell
        self._orders.put(lambda: self._begin(session, request, first_page))

    def grant(self, request_id: str, first_page: int) -> None:
        self._tell("grant", {"id": request_id, "first_page": first_page})

    def received(self, request_id: str, num_pages: int) -> None:
        self._tell("received", {"id": request_id, "num_pages": num_pages})

    def drop(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._tell("drop", {"id": request_id})

    def _begin(self, session: _Session | None, request: Request, first_page: int | None) -> None:
        try:
            if session is None:
                raise PeerError("there is no connection")
            fields, body = messages.pack_request(request)
            session.tell("begin", {"request": fields, "first_page": first_page}, body)
        except (PeerError, RequestError) as error:
            self._give_up(request.request_id, str(error))
        except Exception as error:
            logger.exception("the prompt of %s can't be sent", request.request_id)
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
                    message, body = session.channel.receive()
                    self._parcel(session, Fields(message), body)
            except PeerError as error:
                self._lost(session, error)
            except Exception as error:
                logger.exception("what came from %s:%d", *self._address)
                self._lost(session, error)
        if self._session is not None:
            self._lost(self._session, PeerError("closed"))

    def _parcel(self, session: _Session, message: Fields, body: bytes) -> None:
        """Raises PeerError if it is none."""
        kind, incoming = message.text("kind"), self._decode.handovers.incoming
        if kind == "beat":
            self._reported_tokens = message.integer("backlog_tokens", 0, _MAX_TOKENS)
            self._works = message.flag("works")
            return
        request_id = message.text("id")
        if kind == "pages":
            first_page = message.integer("first_page", 0, MAX_PAGE)
            num_pages = message.integer("num_pages", 1, PAGES_PER_MOVE)
            rows = session.receiver.take(message.part("ticket"), num_pages)
            self._post(session, lambda: incoming.pages(self, request_id, first_page, num_pages, rows))
        elif kind == "first_token":
            token = messages.unpack_token(Fields(message.part("token")), body)
            self._open.pop(request_id, None)
            self._post(session, lambda: incoming.first_token(self, request_id, token))
        elif kind == "failed":
            self._give_up(request_id, message.text("reason"))
        else:
            raise PeerError(f"it sent {kind!r}, which means nothing")

    def _post(self, session: _Session, take: Callable[[], Sequence[TokenEvent] | None]) -> None:
        """Have the engine take a parcel. Of a connection that has ended it takes none, nor acknowledges it to the next
        one; one that makes no sense ends the connection, and harms no engine."""

        def guarded() -> Sequence[TokenEvent] | None:
            if session is not self._session:
                return None
            try:
                return take()
            except PeerError as error:
                logger.warning("the prefill engine at %s:%d: %s", *self._address, error)
                session.channel.close()  # whoever receives sees it
                return None

        self._decode.handovers.post(guarded)

    def _give_up(self, request_id: str, reason: str) -> None:
        logger.info("the prompt of %s is computed here: %s", request_id, reason)
        self._open.pop(request_id, None)
        self._decode.handovers.post(lambda: self._decode.handovers.incoming.take_over(self, request_id))

    def _lost(self, session: _Session, error: Exception) -> None:
        self._session = None
        session.close()
        self._open.clear()
        self._reported_tokens, self._works = 0, True
        if not self._stopping.is_set():
            logger.warning("the prefill engine at %s:%d is lost: %s", *self._address, error)
        self._decode.handovers.post(lambda: self._decode.handovers.incoming.take_over(self))

    # ------------------------------------------------------------------ connecting

    def _reconnect(self) -> None:
        try:
            self._session = self._connect()
            logger.warning("the prefill engine at %s:%d is back", *self._address)
            self._why_not = ""
        except ConfigError as error:
            logger.log(logging.DEBUG if str(error) == self._why_not else logging.WARNING, "%s", error)  # once
            self._why_not = str(error)
        except Exception:
            logger.exception("the prefill engine at %s:%d", *self._address)

    def _connect(self) -> _Session:
        host, port = self._address
        try:
            sock = socket.create_connection(self._address, timeout=CONNECT_S)
        except OSError as error:
            raise ConfigError(
                f"no prefill engine can be reached at {host}:{port}: {error}. Start it first, with --kv-role prefill",
                param="kv_peer",
            ) from error
        self._channel = channel = Channel(sock, self._silence_s)
        try:
            if self._stopping.is_set():
                raise PeerError("nobody wants it any more")
            return self._join(channel)
        except PeerError as error:
            channel.close()
            raise ConfigError(f"the prefill engine at {host}:{port}: {error}", param="kv_peer") from error
        except BaseException:
            channel.close()
            raise

    def _join(self, channel: Channel) -> _Session:
        hello = Fields(channel.receive(from_stranger=True)[0])
        if hello.text("kind") != "hello":
            raise PeerError(f"it said {hello.text('kind')!r} first")
        nonce = secrets.token_hex(16)
        theirs = proof(self._secret, hello.text("nonce"))
        channel.send({"kind": "join", "identity": self._identity, "proof": theirs, "nonce": nonce})
        if (reason := difference(self._identity, hello.part("identity"))) is not None:
            raise PeerError(reason)
        welcome = Fields(channel.receive(from_stranger=True)[0])
        if welcome.text("kind") != "welcome":
            raise PeerError(welcome.text("reason"))
        if self._secret and not is_proof(welcome.text("proof"), self._secret, nonce):
            raise PeerError("it doesn't know the secret: give both sides the same --kv-secret")
        try:
            receiver = self._connector.receiver(welcome.part("offer"), self._decode.handovers.page_rows)
        except ConfigError as error:
            channel.send({"kind": "not joined", "reason": str(error)})
            raise
        session = _Session(channel, receiver, welcome.text("session"))
        try:
            channel.send({"kind": "joined"})
        except PeerError:
            session.close()
            raise
        return session


class _Session:
    """One connection, from its welcome to its end."""

    def __init__(self, channel: Channel, receiver: KVReceiver, name: str):
        self.channel, self.receiver, self._name = channel, receiver, name

    def close(self) -> None:
        self.channel.close()
        self.receiver.close()

    def tell(self, kind: str, fields: dict[str, Any], body: bytes = b"") -> None:
        self.channel.send({"kind": kind, "session": self._name, **fields}, body)
