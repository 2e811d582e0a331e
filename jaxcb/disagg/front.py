"""Disaggregated: an engine that generates, with others that compute prompts for it, as one ServingEngine.

Clients talk to the decode engine: their streams are its own. A prompt goes to the prefill engine with the least to do
(``roles.py`` says which don't); what fails on the way there is computed by the decode engine, which can do everything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

from jaxcb.disagg import roles
from jaxcb.engine import Engine, EngineStats, OutputStream, ServingEngine
from jaxcb.engine.incoming import Source
from jaxcb.errors import ConfigError, EngineStoppedError
from jaxcb.request import Request
from jaxcb.scheduler import SchedulerLimits
from jaxcb.structured_outputs import StructuredOutputs

WATCH_S = 0.05
"""Between two looks at how the load is divided."""


class Link(Source, Protocol):
    """A prefill engine, here or in another process."""

    @property
    def address(self) -> str | None:
        """HOST:PORT of one in another process."""

    @property
    def alive(self) -> bool:
        """It is there, and makes steps if it has any to make."""

    @property
    def backlog_tokens(self) -> int:
        """Prompt tokens that it has taken on, for anybody, and that are not done."""

    def close(self) -> None:
        """Want no more of it. Harmless when called again."""


class Disaggregated(ServingEngine):
    """``decode`` runs, and was started with ``kv_transfer``; ``prefill`` are the engines of this process among those
    behind the links. All of them are shut down with it.

    Raises:
        ConfigError: the engine can't take KV, or there is no link.
    """

    def __init__(self, decode: Engine, links: Sequence[Link], prefill: Sequence[Engine] = ()):
        if not links:
            raise ConfigError("a decode engine needs at least one prefill engine", param="disaggregate")
        if not decode.config.kv_transfer:
            raise ConfigError("the decode engine needs kv_transfer", param="kv_transfer")
        self.decode, self.links, self.prefill = decode, tuple(links), tuple(prefill)
        self.name, self.spec, self.tokenizer = decode.name, decode.spec, decode.tokenizer
        self.asked_for, self.config, self.sampling_defaults = decode.asked_for, decode.config, decode.sampling_defaults
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="jaxcb-roles", daemon=True)
        self._watcher.start()

    # ------------------------------------------------------------------ requests

    def check_request(self, request: Request) -> None:
        self.decode.check_request(request)

    def submit_choices(self, request: Request, *, blocking: bool = False) -> list[OutputStream]:
        link = self._link_for(request)
        if link is None:
            return self.decode.submit_choices(request, blocking=blocking)
        return self.decode.handovers.submit(request, link, blocking=blocking)

    def submit_into(self, request: Request, streams: Sequence[OutputStream]) -> None:
        """See :meth:`Engine.submit_into`."""
        self.decode.submit_into(request, streams, source=self._link_for(request))

    def fork(
        self, parents: Sequence[OutputStream], children: Sequence[tuple[Request, int]], *, blocking: bool = False
    ) -> list[OutputStream]:
        return self.decode.fork(parents, children, blocking=blocking)

    def compile_grammar(self, structured: StructuredOutputs) -> None:
        self.decode.compile_grammar(structured)

    def abort(self, request_id: str) -> None:
        self.decode.abort(request_id)

    def _link_for(self, request: Request) -> Link | None:
        """Who computes the prompt; None: the decode engine."""
        alive = [link for link in self.links if link.alive]
        if not alive or roles.needs_one_engine(request) or roles.is_short(request, self.config.page_size):
            return None
        link = min(alive, key=lambda link: link.backlog_tokens)
        itself = roles.takes_prompts(
            decode_is_idle=self.decode.idle, backlog_tokens=link.backlog_tokens, step_tokens=self._step_tokens
        )
        return None if itself else link

    @property
    def _step_tokens(self) -> int:
        budget = self.config.max_num_batched_tokens
        assert budget is not None  # the config is resolved
        return budget

    def _watch(self) -> None:
        """Prompts that wait elsewhere come back when the decode engine has nothing to do, or the other is dead. When it
        is dead itself, the others get their pages back."""
        handovers = self.decode.handovers
        incoming = handovers.incoming
        while not self._stopping.wait(WATCH_S):
            if not self.decode.healthy:
                for link in self.links:
                    link.close()
                return
            if not incoming.num_coming:
                continue
            idle = self.decode.idle
            for link in self.links:
                if not link.alive:
                    handovers.post(functools.partial(incoming.take_over, link))
                elif idle and link.backlog_tokens > self._step_tokens:
                    handovers.post(functools.partial(incoming.take_back, link, self._step_tokens))

    # ------------------------------------------------------------------ what it is doing

    @property
    def limits(self) -> SchedulerLimits:
        """Of the engine that admits."""
        return self.decode.limits

    def stats_by_engine(self) -> dict[str, EngineStats]:
        """Requests, prompts and tokens are counted where the answers are made; steps and pages where they are."""
        by_engine = {"decode": self.decode.stats()}
        for index, engine in enumerate(self.prefill):
            own = engine.stats()
            by_engine[f"prefill-{index}"] = dataclasses.replace(
                own,
                num_running=0,
                num_waiting=0,
                prompt_tokens=0,
                prompt_tokens_cached=0,
                generation_tokens=0,
                finished=dict.fromkeys(own.finished, 0),
                answers=False,
            )
        return by_engine

    def stats(self) -> EngineStats:
        """Of the engine that answers."""
        return self.decode.stats()

    @property
    def peers(self) -> dict[str, bool]:
        return {link.address: link.alive for link in self.links if link.address is not None}

    @property
    def healthy(self) -> bool:
        return self.decode.healthy

    @property
    def accepting(self) -> bool:
        return self.decode.accepting

    @property
    def paused(self) -> bool:
        return self.decode.paused

    # ------------------------------------------------------------------ control

    def _on_all(self, call: Callable[[Engine], None]) -> None:
        """Prompts first: what they compute anew is wanted by a decode engine that is as new, or wanted no more. Of
        engines that compute them, those that have stopped are done without."""
        for engine in self.prefill:
            with contextlib.suppress(EngineStoppedError):
                call(engine)
        call(self.decode)

    def pause(self) -> None:
        self._on_all(lambda engine: engine.pause())

    def resume(self) -> None:
        self._on_all(lambda engine: engine.resume())

    def sleep(self) -> None:
        self._on_all(lambda engine: engine.sleep())

    def wake(self) -> None:
        self._on_all(lambda engine: engine.wake())

    def update_params(self, params: Any, *, running: Literal["keep", "restart"] = "restart") -> None:
        """As :meth:`ServingEngine.update_params`, of engines of this process. Of prompts that are being handed over
        the decode engine computes the KV itself, with ``running="keep"`` too.

        Raises:
            ConfigError: an engine works with one in another process, which has the old weights.
        """
        self._on_all(lambda engine: engine.handovers.check_update())  # before one has the new ones
        self._on_all(lambda engine: engine.update_params(params, running=running))

    def reset_prefix_cache(self) -> None:
        self._on_all(lambda engine: engine.reset_prefix_cache())

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        self.decode.shutdown(drain_s=drain_s)  # until then somebody watches: prompts may still come back
        self._stopping.set()
        self._watcher.join()
        for link in self.links:
            link.close()
        for engine in self.prefill:
            engine.shutdown()
