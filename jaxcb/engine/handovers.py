"""Handovers: an engine's work with other engines: prompts that they compute for it, and that it computes for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import jax

from jaxcb import validation
from jaxcb.engine import prepare
from jaxcb.engine.core import EngineCore, PrefixPages
from jaxcb.engine.inbox import Add, Inbox, Post
from jaxcb.engine.incoming import Incoming, Source
from jaxcb.engine.outgoing import Outgoing, Sink
from jaxcb.engine.stream import OutputStream, running_loop
from jaxcb.errors import ConfigError, RequestError
from jaxcb.grammar import Grammar
from jaxcb.request import Request
from jaxcb.scheduler import TokenEvent

Submit = Callable[[Request, asyncio.AbstractEventLoop | None, Add], list[OutputStream]]
"""Checks a request, opens its streams, and puts it into the inbox."""


class Handovers:
    """Of one engine. What is said of no thread may be called from any.

    Arguments:
        submit: the engine's own.
        transfers: it was started with ``kv_transfer``.
    """

    def __init__(self, core: EngineCore, inbox: Inbox, submit: Submit, *, transfers: bool):
        self._core, self._inbox, self._submit, self._transfers = core, inbox, submit, transfers
        self._keepers: set[object] = set()
        self.num_updates = 0
        """How often the weights were changed. Engines that hand over to each other are to be changed alike: while they
        differ in this, each computes its own prompts. The engine's thread counts."""

    # ------------------------------------------------------------------ prompts that others compute

    def submit(self, request: Request, source: Source, *, blocking: bool = False) -> list[OutputStream]:
        """As :meth:`ServingEngine.submit_choices`, but another engine computes the prompt and the first token, which
        arrive through :meth:`post` and ``incoming``."""
        return self._submit(request, None if blocking else running_loop(), self.adding(source))

    def adding(self, source: Source) -> Add:
        """How a request is taken up whose prompt another engine computes, if that is worth it."""

        def expect(choices: list[Request], grammar: Grammar | None) -> None:
            if self.incoming.knows(choices[0]):
                self._core.add_choices(choices, grammar)
            else:
                self.incoming.expect(choices, grammar, source)

        return expect

    @property
    def incoming(self) -> Incoming:
        """For functions that are posted."""
        return self._core.incoming

    # ------------------------------------------------------------------ prompts for others

    def submit_prompt(
        self,
        request: Request,
        outgoing: Outgoing,
        request_id: str,
        first_page: int | None,
        num_updates: int | None = None,
    ) -> OutputStream:
        """Compute a request's prompt and its first token for another engine. Its KV goes out as steps fill pages.
        Errors as for :meth:`ServingEngine.submit`.

        Arguments:
            request_id: as for :meth:`Outgoing.begin`; so is ``first_page``.
            num_updates: with other weights than after so many updates here the request ends with an error; None: with
                any, since the other engine makes sure of them.
        """

        def begin(choices: list[Request], grammar: Grammar | None) -> None:
            if num_updates not in (None, self.num_updates):
                raise RequestError("the two engines have different weights", param="params")
            key = choices[0].request_id
            outgoing.begin(key, request_id, len(request.prompt_token_ids), first_page)
            self._core.add_choices(choices, grammar)

        return self._submit(prepare.prompt_only(request), None, begin)[0]

    def send_to(self, sink: Sink) -> Outgoing:
        """A way for KV to another engine; :meth:`send_no_more` ends it.

        Raises:
            ConfigError: the engine was started without ``kv_transfer``.
            EngineStoppedError: it has stopped.
        """
        self.check()
        outgoing = Outgoing(self._core.scheduler, self._core.runner, sink)
        self._inbox.call(lambda: self._core.outgoing.append(outgoing))
        return outgoing

    def send_no_more(self, outgoing: Outgoing) -> None:
        """The other engine is gone: what was lent to it is free again."""

        def end() -> None:
            outgoing.drop_all()
            self._core.outgoing.remove(outgoing)

        self.post(end)

    # ------------------------------------------------------------------ both

    def post(self, function: Callable[[], Sequence[TokenEvent] | None]) -> None:
        """Have the engine's thread call a function between two steps, in the order of the posts, and wait for nothing.
        Nothing happens once the engine has stopped."""
        if self._inbox.error is None and not self._inbox.stopping:
            self._inbox.put(Post(function))

    @property
    def page_rows(self) -> jax.ShapeDtypeStruct:
        """A batch of pages as it travels: shape [PAGES_PER_MOVE, L, 2, page_size, K, D], dtype and sharding here."""
        return self._core.runner.page_rows

    @property
    def page_form(self) -> str:
        """What a page is, in words: shape, dtype and order of its numbers. Pages of another form mean nothing here."""
        runner = self._core.runner
        shape, dtype = runner.page_shape
        return f"{'x'.join(map(str, shape))} {dtype} in {runner.page_order}"

    def check(self) -> None:
        """Raise ConfigError if the engine was started without ``kv_transfer``."""
        if not self._transfers:
            raise ConfigError("KV can't be handed over: start the engine with kv_transfer", param="kv_transfer")

    # ------------------------------------------------------------------ beginnings that others know

    def export_prefix(self, token_ids: Sequence[int], cache_salt: str = "") -> PrefixPages:
        """The KV of the longest cached beginning of ``token_ids``, for another engine over the same weights.

        Raises:
            ConfigError: the engine was started without ``kv_transfer``.
            EngineStoppedError: it has stopped.
        """
        self.check()
        ids = validation.token_ids("token_ids", token_ids)
        return self._inbox.call(lambda: self._core.export_prefix(ids, cache_salt))

    def import_prefix(self, prefix: PrefixPages, cache_salt: str = "") -> int:
        """Cache what another engine exported; what finds no free page is left out. Returns the tokens placed.

        Raises:
            ConfigError: the engine was started without ``kv_transfer``, or its pages have another shape
                or order.
            EngineStoppedError: it has stopped.
        """
        self.check()
        runner = self._core.runner
        ours, theirs = runner.page_shape, (prefix.pages.shape[1:], prefix.pages.dtype)
        if ours != theirs:
            raise ConfigError(f"the pages hold {theirs}, this engine's hold {ours}", param="page_size")
        if runner.page_order != prefix.order:
            raise ConfigError(
                f"the pages hold {prefix.order}, this engine's hold {runner.page_order}: their backends or CPUs differ",
                param="backend",
            )
        return self._inbox.call(lambda: self._core.import_prefix(prefix, cache_salt))

    # ------------------------------------------------------------------ weights

    def keep_weights(self, keeper: object) -> None:
        """Refuse other weights, until :meth:`let_weights_go`: another process goes by those that there are."""
        self._keepers.add(keeper)

    def let_weights_go(self, keeper: object) -> None:
        """Harmless if it keeps them no more."""
        self._keepers.discard(keeper)

    def check_update(self) -> None:
        """Raise ConfigError if the weights can't be changed now."""
        if self._keepers:
            raise ConfigError(
                "weights can't be changed while prompts are computed in or for another process, which has the old ones",
                param="params",
            )

    def weights_changed(self) -> None:
        """On the engine's thread: what is on its way was computed with others, and counts no more."""
        self.num_updates += 1
        self._core.give_up_handovers()
