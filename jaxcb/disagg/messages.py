"""Requests and first tokens as messages: a JSON part and raw bytes."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np

from jaxcb.disagg.wire import PeerError
from jaxcb.engine.incoming import FirstToken
from jaxcb.logprobs import Logprobs
from jaxcb.request import Request, SamplingParams

_ARRAYS = tuple(field.name for field in dataclasses.fields(Logprobs))


def pack_request(request: Request) -> tuple[dict[str, Any], bytes]:
    """Its prompt is the body. States of logits processors stay here: the other side makes its own.

    Raises:
        TypeError, ValueError: ``extra_args`` hold what JSON can't say (when the message is sent).
    """
    fields = dataclasses.asdict(dataclasses.replace(request, processor_states=(), prompt_token_ids=(0,)))
    del fields["processor_states"], fields["prompt_token_ids"]
    fields["age_s"] = time.monotonic() - fields.pop("arrival_s")  # clocks of other machines start elsewhere
    return fields, np.asarray(request.prompt_token_ids, "<i4").tobytes()


def unpack_request(fields: dict[str, Any], body: bytes) -> Request:
    """Raises RequestError or PeerError if it is none."""
    values = dict(fields)
    try:
        values["arrival_s"] = time.monotonic() - values.pop("age_s")
        values["sampling"] = SamplingParams(**values["sampling"])
        return Request(**values, prompt_token_ids=np.frombuffer(body, "<i4").tolist())
    except (TypeError, KeyError, ValueError) as error:
        raise PeerError(f"the other side sent a request that can't be read: {error}") from error


def pack_token(token: FirstToken) -> tuple[dict[str, Any], bytes]:
    """Arrays of log-probabilities are the body, one after the other."""
    fields: dict[str, Any] = {"token_id": token.token_id, "num_cached_tokens": token.num_cached_tokens}
    if token.logprobs is None:
        return fields, b""
    arrays = [np.ascontiguousarray(getattr(token.logprobs, name)) for name in _ARRAYS]
    fields["arrays"] = [[array.dtype.str, list(array.shape)] for array in arrays]
    return fields, b"".join(array.tobytes() for array in arrays)


def unpack_token(fields: dict[str, Any], body: bytes) -> FirstToken:
    """Raises PeerError if it is none."""
    try:
        logprobs = None
        if "arrays" in fields:
            arrays, start = [], 0
            for dtype, shape in fields["arrays"]:
                count = int(np.prod(shape, dtype=np.int64))
                array = np.frombuffer(body, np.dtype(dtype), count, start)
                arrays.append(array.reshape(shape))
                start += array.nbytes
            logprobs = Logprobs(**dict(zip(_ARRAYS, arrays, strict=True)))
        return FirstToken(int(fields["token_id"]), int(fields["num_cached_tokens"]), logprobs)
    except (TypeError, KeyError, ValueError) as error:
        raise PeerError(f"the other side sent a token that can't be read: {error}") from error
