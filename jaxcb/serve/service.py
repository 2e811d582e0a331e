"""The one object behind all routes: the engine, the names it is served under, and what is measured of each request."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from jaxcb.errors import EngineStoppedError, JaxcbError, RequestError
from jaxcb.parsing.choose import ToolFormat
from jaxcb.parsing.reasoning import Markers
from jaxcb.request import FinishReason, Request, RequestOutput
from jaxcb.serve.call import Call
from jaxcb.serve.errors import ApiError, stopped
from jaxcb.serve.metrics import Metrics

if TYPE_CHECKING:
    from jaxcb.engine import OutputStream, ServingEngine

logger = logging.getLogger("jaxcb.serve")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Service:
    """``model_names`` are the names that requests may use; answers carry the first. ``tool_format`` and ``reasoning``
    say how the model writes calls of tools and its reasoning, if it is known."""

    engine: ServingEngine
    model_names: tuple[str, ...]
    metrics: Metrics
    tool_format: ToolFormat | None = None
    reasoning: Markers | None = None
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))
    _reading: set[asyncio.Timeout] = dataclasses.field(default_factory=set)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """Around the reading of a body, which :meth:`stop_reading` ends.

        Raises:
            EngineStoppedError: it did.
        """
        try:
            async with asyncio.timeout(None) as timeout:
                self._reading.add(timeout)
                yield
        except TimeoutError as error:
            raise EngineStoppedError("the server is shutting down") from error
        finally:
            self._reading.discard(timeout)

    def stop_reading(self) -> None:
        """Give up on bodies that are still under way; on the event loop's thread."""
        for timeout in self._reading:
            timeout.reschedule(0.0)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its answer."""
        limit = self.engine.config.max_model_len
        assert limit is not None  # the engine resolved it when it started
        return limit

    def sampling_defaults(self, num_prompt_tokens: int, max_tokens: int | None) -> dict[str, Any]:
        """Of a request, for what it leaves out: those of the model; ``max_tokens`` is the endpoint's own.

        Near the context limit the default of ``max_tokens`` is what still fits.
        """
        defaults = {"max_tokens": max_tokens} | self.engine.sampling_defaults
        room = self.max_model_len - num_prompt_tokens
        if defaults["max_tokens"] is not None and room > 0:
            defaults["max_tokens"] = min(defaults["max_tokens"], room)
        return defaults

    def check_model(self, name: str | None) -> str:
        """The name to answer with; None means the only model there is.

        Raises:
            ApiError: 404 for a name that is not served.
        """
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(
                404, f"model {name[:80]!r} does not exist; served: {served}", param="model", code="model_not_found"
            )
        return self.model_names[0]

    def submit(self, call: Call) -> list[OutputStream]:
        """Hand every prompt of a call to the engine, or none.

        Raises:
            RequestError, QueueFullError, EngineStoppedError: the engine refused one of them.
        """
        requests = (
            Request(
                request_id=f"{call.id}-{index}",
                prompt_token_ids=prompt.token_ids,
                sampling=prompt.sampling,
                arrival_s=call.arrival_s,
                **call.scheduling,
            )
            for index, prompt in enumerate(call.prompts)
        )
        count = sum(prompt.sampling.num_choices for prompt in call.prompts)
        return self.submit_all(requests, count, call.field_names)

    def submit_all(self, requests: Iterable[Request], count: int, field_names: Mapping[str, str]) -> list[OutputStream]:
        """Hand requests, with ``count`` answers together, to the engine, or none. Errors as for :meth:`submit`."""
        limit = self.engine.config.max_waiting
        if limit is not None and count > limit:
            param = field_names.get("prompt", "prompt")
            raise RequestError(
                f"{param} and n ask for {count} answers; this server's queue takes at most {limit}", param=param
            )
        streams: list[OutputStream] = []
        try:
            for request in requests:
                streams += self.engine.submit_choices(request)
        except JaxcbError as error:
            for stream in streams:
                stream.abort()
            if isinstance(error, RequestError) and error.param is not None:
                raise _by_the_body_s_names(error, field_names) from error
            raise
        return streams


def _by_the_body_s_names(error: RequestError, field_names: Mapping[str, str]) -> RequestError:
    if error.param == "extra_args":
        return RequestError(str(error).replace("extra_args", "vllm_xargs"), param="vllm_xargs")
    return RequestError(str(error), param=field_names.get(error.param or "", error.param))


class Meter:
    """Watches the outputs of one sequence go by: gaps between tokens, the log line and the metrics at its end."""

    def __init__(self, service: Service):
        self._metrics = service.metrics
        self._last_s: float | None = None

    def saw(self, output: RequestOutput) -> None:
        """Call with every output, in order.

        Raises:
            ApiError: the engine failed, or dropped the sequence; 400 where what the request asks for can't be done, as
                when its parameters leave no token that its grammar allows.
        """
        now_s = time.monotonic()
        if output.new_token_ids:
            if self._last_s is not None:
                self._metrics.inter_token_s.observe(now_s - self._last_s)
            self._last_s = now_s
        if output.finish_reason is None:
            return
        _log_end(output)
        if output.finish_reason is FinishReason.ERROR:
            if output.error is not None and not output.engine_failed:
                raise ApiError(400, output.error, code="request_failed")
            logger.error("%s failed: %s", output.request_id, output.error)
            raise ApiError(500, "The engine failed while this request was running.", code="engine_error")
        if output.finish_reason is FinishReason.ABORT:
            raise stopped()
        self._metrics.finished(output)


def log_left(name: str) -> None:
    logger.info("%s: the client left; dropped", name)


def _log_end(output: RequestOutput) -> None:
    generated = len(output.token_ids)
    timing = ""
    if output.first_token_s is not None and output.finished_s is not None:
        decode_s = output.finished_s - output.first_token_s
        timing = f", first token {output.first_token_s - output.arrival_s:.3f} s"
        if generated > 1 and decode_s > 0:
            timing += f", then {(generated - 1) / decode_s:.1f} tok/s"
    logger.info(
        "%s: %s after %d + %d tokens (%d cached, preempted %d times)%s",
        output.request_id,
        output.finish_reason,
        len(output.prompt_token_ids),
        generated,
        output.num_cached_tokens,
        output.num_preemptions,
        timing,
    )
