"""Requests and first tokens as messages: a JSON part and raw bytes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from jaxcb.disagg.fields import Fields
from jaxcb.engine.incoming import FirstToken
from jaxcb.errors import PeerError, RequestError
from jaxcb.logprobs import Logprobs
from jaxcb.request import Request, SamplingParams

_IDS = {"token_ids": "<i4", "ranks": "<i4", "top_ids": "<i4"}
_ARRAYS = {field.name: np.dtype(_IDS.get(field.name, "<f4")) for field in dataclasses.fields(Logprobs)}
"""Of log-probabilities, in their order in the body."""
_MAX_COUNT = 1 << 24
"""Of alternatives: more than any vocabulary has."""


def pack_request(request: Request) -> tuple[dict[str, Any], bytes]:
    """What its prompt and first token hang on; the prompt is the body. What the other side makes itself stays here:
    states of logits processors, ids of words.

    Raises:
        RequestError: ``extra_args`` hold what would be something else after the way.
    """
    if not _survives(request.sampling.extra_args):
        raise RequestError("extra_args hold what JSON can't say, so they can't be sent", param="extra_args")
    fields = {
        "id": request.request_id,
        "age_s": float(time.monotonic() - request.arrival_s),  # clocks of other machines start elsewhere
        "priority": float(request.priority),  # they may be numpy's
        "tenant": request.tenant,
        "ttft_deadline_s": None if request.ttft_deadline_s is None else float(request.ttft_deadline_s),
        "cache_salt": request.cache_salt,
        "sampling": dataclasses.asdict(request.sampling),
    }
    return fields, np.asarray(request.prompt_token_ids, "<i4").tobytes()


def unpack_request(fields: Fields, body: bytes) -> Request:
    """Raises RequestError if it is an impossible one, PeerError if it is none."""
    if len(body) % 4:
        raise PeerError(f"its prompt has {len(body)} bytes")
    values = fields.part("sampling")
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    if not values.keys() <= names:
        raise PeerError(f"its sampling has a field that there isn't: {sorted(values.keys() - names)[0]!r}")
    return Request(
        request_id=fields.text("id"),
        prompt_token_ids=np.frombuffer(body, "<i4").tolist(),
        sampling=SamplingParams(**values),
        arrival_s=time.monotonic() - fields.number("age_s"),
        priority=fields.number("priority"),
        tenant=fields.text("tenant"),
        ttft_deadline_s=fields.number("ttft_deadline_s") if fields.has("ttft_deadline_s") else None,
        cache_salt=fields.text("cache_salt"),
    )


def pack_token(token: FirstToken) -> tuple[dict[str, Any], bytes]:
    """Arrays of log-probabilities are the body, one after the other."""
    fields: dict[str, Any] = {"token_id": token.token_id, "num_cached_tokens": token.num_cached_tokens}
    if token.logprobs is None:
        return fields, b""
    fields["alternatives"] = token.logprobs.top_ids.shape[1]
    arrays = [np.ascontiguousarray(getattr(token.logprobs, name), dtype) for name, dtype in _ARRAYS.items()]
    return fields, b"".join(array.tobytes() for array in arrays)


def unpack_token(fields: Fields, body: bytes) -> FirstToken:
    """Raises PeerError if it is none. Whether it is one of the model's is left to whoever takes it."""
    logprobs = None
    if fields.has("alternatives"):
        count, start, arrays = fields.integer("alternatives", 0, _MAX_COUNT), 0, {}
        for name, dtype in _ARRAYS.items():
            shape = (1, count) if name.startswith("top") else (1,)
            end = start + int(np.prod(shape)) * dtype.itemsize
            if end > len(body):
                raise PeerError(f"its log-probabilities have {len(body)} bytes")
            arrays[name] = np.frombuffer(body[start:end], dtype).reshape(shape)
            start = end
        logprobs = Logprobs(**arrays)
    last = np.iinfo(np.int32).max
    return FirstToken(fields.integer("token_id", 0, last), fields.integer("num_cached_tokens", 0, last), logprobs)


def _survives(value: Any) -> bool:
    """It comes out of JSON as it goes in: no tuple becomes a list, no key of another type a string."""
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(_survives, value.values()))
    if isinstance(value, list):
        return all(map(_survives, value))
    return value is None or type(value) in (bool, int, float, str)
