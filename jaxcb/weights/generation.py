"""A model's own sampling defaults, from its ``generation_config.json``: what a request is given for what it leaves out.

Read: temperature, top_k, top_p, min_p, repetition_penalty, and max_new_tokens as ``max_tokens``. ``do_sample`` is not
looked at, as in vLLM: files that carry a temperature mean it. The end tokens of the file are read with the model's
description, whatever is said here: they are no matter of taste.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxcb.errors import ModelError, RequestError
from jaxcb.sampling_params import SamplingParams

_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys of the file to fields of SamplingParams."""


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams that the file sets; null sets nothing.

    Raises:
        ModelError: a value can't be; the message names the key.
    """
    defaults = {}
    for key, name in _NAMES.items():
        if (value := generation_config.get(key)) is None:
            continue
        try:
            SamplingParams(**{name: value})
        except RequestError as error:
            raise ModelError(
                f"generation_config.json: {key}: {error}. Without the file's defaults: --generation-config none"
            ) from error
        defaults[name] = value
    return defaults
