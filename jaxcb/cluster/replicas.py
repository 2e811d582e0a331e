"""Replicas: data parallel engines, with requests routed by what their caches hold and how much they have to do.

A request goes where its beginning was sent before, so that the pages are there, unless that engine has much more to do
than the idlest one: then the idlest takes it, and the beginning's home moves there. (SGLang's cache-aware router, Zheng
et al. 2024, with a table of beginnings in place of its tree.)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from jaxcb.engine import Engine, OutputStream
from jaxcb.errors import ConfigError, EngineStoppedError, QueueFullError
from jaxcb.request import Request

AFFINITY_TOKENS = 64
"""A beginning of so many tokens has a home; shorter prompts have none."""
MAX_HOMES = 100_000
MOST_AHEAD = 8
"""Requests that a home may have more than the idlest engine."""


class Replicas:
    """Routes between running engines over the same model. Any thread may call it."""

    def __init__(self, engines: Sequence[Engine]):
        if not engines:
            raise ConfigError("a cluster needs at least one engine", param="engines")
        if len({engine.name for engine in engines}) > 1:
            names = ", ".join(sorted({engine.name for engine in engines}))
            raise ConfigError(f"the engines of a cluster serve different models: {names}", param="engines")
        self.engines = tuple(engines)
        self._lock = threading.Lock()
        self._homes: OrderedDict[tuple[str, bytes], int] = OrderedDict()

    def submit(self, request: Request) -> OutputStream:
        """As :meth:`jaxcb.engine.Engine.submit`, on the engine that suits it best. One that is full or has stopped is
        passed by.

        Raises:
            RequestError: the request is impossible.
            QueueFullError: every engine is full.
            EngineStoppedError: none is running.
        """
        refusal: QueueFullError | EngineStoppedError | None = None
        for index in self._in_order(request):
            try:
                return self.engines[index].submit(request)
            except (QueueFullError, EngineStoppedError) as error:
                if refusal is None or isinstance(error, QueueFullError):
                    refusal = error
        assert refusal is not None  # there is an engine, and it refused
        raise refusal

    def shutdown(self, *, drain_s: float = 0.0) -> None:
        """Shut every engine down; all drain at the same time."""
        threads = [
            threading.Thread(target=engine.shutdown, kwargs={"drain_s": drain_s}, name=f"jaxcb-drain-{i}")
            for i, engine in enumerate(self.engines)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _in_order(self, request: Request) -> list[int]:
        """Engines to try: the home of the request's beginning or the idlest, then the others, idlest first."""
        loads = [_load(engine) for engine in self.engines]
        order = sorted(range(len(loads)), key=loads.__getitem__)
        if len(request.prompt_token_ids) < AFFINITY_TOKENS:
            return order
        beginning = (request.cache_salt, str(list(request.prompt_token_ids[:AFFINITY_TOKENS])).encode())
        with self._lock:
            home = self._homes.get(beginning)
            if home is None or loads[home] > loads[order[0]] + MOST_AHEAD:
                home = order[0]
            self._homes[beginning] = home
            self._homes.move_to_end(beginning)
            if len(self._homes) > MAX_HOMES:
                self._homes.popitem(last=False)
        return [home, *(index for index in order if index != home)]


def _load(engine: Engine) -> float:
    """Requests that an engine has to do; a stopped one comes last."""
    if not engine.healthy:
        return float("inf")
    stats = engine.stats()
    return stats.num_running + stats.num_waiting
