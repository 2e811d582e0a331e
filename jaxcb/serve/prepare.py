"""From a checked conversation to a call: what the endpoints that answer a conversation have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jaxcb.errors import RequestError
from jaxcb.serve.call import Call, Prompt, new_id
from jaxcb.serve.conversation import Conversation
from jaxcb.serve.requests import SamplingFields
from jaxcb.structured_outputs import StructuredOutputs

if TYPE_CHECKING:
    from jaxcb.serve.service import Service


def conversation_call(
    conversation: Conversation,
    sampling: SamplingFields,
    service: Service,
    *,
    prefix: str,
    model: str,
    stream: bool,
    scheduling: Mapping[str, Any],
    field_names: Mapping[str, str],
    asked: Any,
    wanted: StructuredOutputs | None = None,
    logprobs: int | None = None,
) -> Call:
    """One answer to a conversation. ``prefix`` is that of the answer's id, ``wanted`` the language that the body holds
    the answer to, ``logprobs`` how many likeliest tokens it asks for; the others are fields of the call.

    Raises:
        RequestError: a value is out of range, or the template refuses the messages; ``.param`` names the field.
    """
    try:
        sampling.params(defaults={}, logprobs=logprobs)  # refused before the template does its work
        text = conversation.render(service)
        token_ids = service.engine.tokenizer.encode_chat(text, max_tokens=service.max_model_len)
        own = conversation.sampling(service, text, wanted)
        params = sampling.params(defaults=service.sampling_defaults(len(token_ids), None), logprobs=logprobs, **own)
    except RequestError as error:
        raise RequestError(str(error), param=field_names.get(error.param or "", error.param)) from error
    return Call(
        id=new_id(prefix),
        model=model,
        prompts=[Prompt(token_ids, params)],
        stream=stream,
        include_usage=True,
        tokenizer=service.engine.tokenizer,
        scheduling=scheduling,
        reading=conversation.reading(service, text),
        new_call_id=conversation.format(service).new_id,
        field_names=field_names,
        asked=asked,
    )
