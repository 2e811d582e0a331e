"""``use_beam_search`` over HTTP: what of a body it honours, and its answer. ``n`` is the width."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from jaxcb import validation
from jaxcb.beam import BeamParams
from jaxcb.errors import RequestError
from jaxcb.request import Request, RequestOutput
from jaxcb.sampling_params import MAX_CHOICES
from jaxcb.serve.requests import SamplingFields

if TYPE_CHECKING:
    from jaxcb.engine.beams import Searching
    from jaxcb.serve.call import Call
    from jaxcb.serve.service import Service

DEFAULT_WIDTH = 4
_HONOURED = frozenset({"n", "temperature", "max_tokens", "ignore_eos", "stop_token_ids"})


class BeamFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every generating endpoint that ask for a beam search."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None

    def params(self, sampling: SamplingFields, **refused: Any) -> BeamFields | None:
        """These fields, if they ask for a search. ``refused`` are fields of the endpoint that it can't honour.

        Raises:
            RequestError: a field has no meaning beside the others; ``.param`` names it.
        """
        if not self.use_beam_search:
            for name, neutral in (("length_penalty", 1), ("early_stopping", False)):
                if getattr(self, name) not in (None, neutral):
                    raise RequestError(f"{name} needs use_beam_search to be true", param=name)
            return None
        given = {name: getattr(sampling, name) for name in sampling.__struct_fields__} | refused
        for name, value in given.items():
            if name not in _HONOURED and value not in (None, False):
                raise RequestError(f"{name} can't be honoured by a beam search: leave it out", param=name)
        if sampling.temperature not in (None, 0, 1):
            raise RequestError(
                f"temperature must be 0 or left out in a beam search, got {sampling.temperature:g}", param="temperature"
            )
        return self

    def of(self, sampling: SamplingFields, max_tokens: int) -> BeamParams:
        """How to search; ``max_tokens`` stands for what was not sent."""
        width = DEFAULT_WIDTH if sampling.n is None else sampling.n
        return BeamParams(
            width=validation.integer("n", width, low=1, high=MAX_CHOICES),
            max_tokens=max_tokens if sampling.max_tokens is None else sampling.max_tokens,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            early_stopping=False if self.early_stopping is None else self.early_stopping,
            ignore_eos=bool(sampling.ignore_eos),
            stop_token_ids=tuple(sampling.stop_token_ids or ()),
        )


def requests_of(service: Service, call: Call) -> list[Request]:
    """A request for each prompt of a call that asks for beam search, checked.

    Raises:
        RequestError: one of them can never run.
    """
    from jaxcb.engine.beams import check_beams

    requests = []
    for index, (prompt, params) in enumerate(zip(call.prompts, call.beams, strict=True)):
        request = Request(
            request_id=f"{call.id}-{index}",
            prompt_token_ids=prompt.token_ids,
            arrival_s=call.arrival_s,
            **call.scheduling,
        )
        try:
            check_beams(service.engine, request, params)
        except RequestError as error:
            names = {"width": "n"} | dict(call.field_names)
            raise RequestError(str(error), param=names.get(error.param or "", error.param)) from error
        requests.append(request)
    return requests


async def search_all(service: Service, call: Call, requests: list[Request]) -> list[RequestOutput]:
    """The answers to every prompt, one prompt after the other."""
    from jaxcb.engine.beams import search

    outputs: list[RequestOutput] = []
    for request, params in zip(requests, call.beams, strict=True):
        searching = search(service.engine, request, params, blocking=False)
        with contextlib.closing(searching):
            outputs += await _finished(searching)
    return outputs


async def _finished(searching: Searching) -> list[RequestOutput]:
    """Bring a search what it waits for until it has its result."""
    streams = next(searching)
    while True:
        outputs = await asyncio.gather(*(anext(stream) for stream in streams))
        try:
            streams = searching.send(outputs)
        except StopIteration as end:
            return end.value
