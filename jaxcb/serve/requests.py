"""What the endpoints accept: fields that are honoured, fields without effect, and values of those not supported yet.

The names come from OpenAI's reference and, for the extras, from vLLM. null is the same as leaving a field out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from jaxcb.errors import RequestError
from jaxcb.request import SamplingParams
from jaxcb.sampling_params import MAX_LOGPROBS
from jaxcb.serve.tools import ToolCall


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every generating endpoint that go into :class:`jaxcb.request.SamplingParams` under the same name."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    top_n_sigma: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_sequence_breakers: list[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    """``extra_args``, by the name that vLLM has for them over HTTP."""

    def params(self, *, defaults: Mapping[str, Any], **more: Any) -> SamplingParams:
        """The checked parameters; ``defaults`` stand for what was not sent, and ``more`` are the endpoint's own fields.

        Raises:
            RequestError: a value is out of range; ``.param`` names the field.
        """
        given = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        if (extra_args := given.pop("vllm_xargs", None)) is not None:
            given["extra_args"] = extra_args
        return SamplingParams(**{**defaults, **given, **more})


class SchedulingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every generating endpoint that go into :class:`jaxcb.request.Request` under the same name."""

    priority: float | None = None
    cache_salt: str | None = None

    def given(self, policy: object) -> dict[str, Any]:
        """Those that were sent.

        Raises:
            RequestError: a priority, which this server's scheduling policy would ignore.
        """
        if self.priority and policy != "priority":
            raise RequestError(
                f"priority is honoured under --policy priority only; this server's policy is {policy}",
                param="priority",
            )
        return {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}


MAX_COUNTED_CHARS = 4_000_000
"""Characters in one request of texts whose tokens are counted or cut, and so need not fit the context: a million
tokens, which take a core about ten seconds."""


def check_counted(name: str, *texts: str) -> None:
    """Raise RequestError where ``texts``, which the field ``name`` holds, are too long to be tokenized at once."""
    if (count := sum(map(len, texts))) > MAX_COUNTED_CHARS:
        raise RequestError(
            f"{name} has {count} characters; at most {MAX_COUNTED_CHARS} are tokenized in one request: send it in "
            "pieces",
            param=name,
        )


class PromptFields(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM's extras about the prompt's tokens: how many are kept, and whether ids come back."""

    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None

    def longest_text(self, max_model_len: int) -> int | None:
        """Tokens beyond which a text is refused before it is tokenised; None: it will be cut."""
        return max_model_len if self.truncate_prompt_tokens is None else None

    def cut(self, token_ids: Sequence[int], max_model_len: int) -> Sequence[int]:
        """The last tokens, as many as are asked for; -1: as many as leave room for one more.

        Raises:
            RequestError: no prompt can be so long.
        """
        count = self.truncate_prompt_tokens
        if count is None:
            return token_ids
        most = max_model_len - 1
        if count != -1 and not 1 <= count <= most:
            raise RequestError(
                f"truncate_prompt_tokens must be -1 or in [1, {most}], got {count}", param="truncate_prompt_tokens"
            )
        return token_ids[-(most if count == -1 else count) :]


class IgnoredFields(msgspec.Struct, frozen=True, kw_only=True):
    """Accepted without effect: they ask nothing of the answer."""

    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    "spaces_between_special_tokens": (True,),
    "return_tokens_as_token_ids": (False,),
    "request_id": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
}
"""Known fields that no endpoint honours yet, with the values that ask for what happens anyway."""

CHAT_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **UNSUPPORTED,
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    "echo": (False,),
    "add_special_tokens": (False,),
    "chat_template": (),
    "documents": ([],),
}

COMPLETION_UNSUPPORTED: Mapping[str, Sequence[Any]] = {
    **UNSUPPORTED,
    "suffix": (),
    "parallel_tool_calls": (True,),
    "add_special_tokens": (True,),
}


ROLES = ("system", "developer", "user", "assistant", "tool")
LogprobCount = Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``include_usage`` asks for a last chunk with the usage; the others are refused unless false."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None

    def __post_init__(self) -> None:
        for name in ("include_obfuscation", "continuous_usage_stats"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported: leave it out or send false")


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message's content. Other keys than ``text`` (``image_url``, ...) come with another ``type``."""

    type: str
    text: str | None = None

    def __post_init__(self) -> None:
        if self.type != "text":
            raise ValueError(f'only parts of type "text" are supported, got {self.type[:40]!r}')
        if self.text is None:
            raise ValueError('a part of type "text" needs the field text')


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One message. Some fields belong to answers that clients send back, and must be empty."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: Any = None
    function_call: Any = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be {', '.join(ROLES[:-1])} or {ROLES[-1]}, got {self.role[:40]!r}")
        for name in ("refusal", "annotations", "audio", "function_call"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported in a message: leave it out or send null")
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) and self.role != "assistant":
                raise ValueError(f"{name} belongs to messages of the role assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise ValueError("tool_call_id belongs to messages of the role tool")
        if self.tool_call_id is None and self.role == "tool":
            raise ValueError("a message of the role tool needs the field tool_call_id")


class TemplateFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of every endpoint that takes messages: how they are rendered."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def given(self) -> dict[str, Any]:
        """Fields of :class:`jaxcb.serve.conversation.Conversation`. Behind an open message no new one begins, unless
        that is asked for."""
        open_end = bool(self.continue_final_message)
        prompt = not open_end if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": prompt,
            "continue_final_message": open_end,
            "template_kwargs": self.chat_template_kwargs or {},
        }


class ChatFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions, without the fields above. ``model`` may be left out: there is only one."""

    messages: list[ChatMessage]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class CompletionFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. ``prompt``: a string, token ids, or a list of either (not both)."""

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: LogprobCount | None = None
    prompt_logprobs: LogprobCount | None = None
