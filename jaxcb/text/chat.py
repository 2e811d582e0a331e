"""Chat templates: Jinja source from the model, rendered in transformers' sandbox so that prompts equal its own."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxcb import validation
from jaxcb.errors import RequestError

SAFE_KWARGS: Mapping[str, type] = {
    "enable_thinking": bool,
    "thinking": bool,
    "thinking_budget": int,
    "reasoning_effort": str,
    "date_string": str,
    "tools_in_user_message": bool,
}
"""What a request may set of a template. Other names reach into the template's own business (CVE-2025-62426)."""


def render(
    template: str,
    messages: object,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, str],
    add_generation_prompt: bool,
    continue_final_message: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """The text that ``template`` makes of ``messages``. ``template_kwargs`` are of ``SAFE_KWARGS``, and read by the
    template.

    Raises:
        RequestError: the messages are malformed, or the template (which the model brought) raised something.
    """
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message leaves the last message open and add_generation_prompt begins a new one; "
            "set only one of them",
            param="continue_final_message",
        )
    kwargs = _check_kwargs(template, template_kwargs or {})
    checked = [_check_message(index, message) for index, message in enumerate(_check_list(messages))]
    render_jinja_template = _renderer()
    try:
        rendered, _ = render_jinja_template(
            conversations=[checked],
            tools=[dict(tool) for tool in tools] if tools else None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **special_tokens,
            **kwargs,
        )
    except Exception as error:  # the template is a program from outside: whatever it raises refuses this request
        raise _refused(error) from error
    return rendered[0]


@functools.lru_cache(maxsize=4)
def variables(template: str) -> frozenset[str]:
    """Names that a template reads from outside.

    Raises:
        RequestError: it can't be compiled.
    """
    import jinja2.meta
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        tree = _compile_jinja_template(template).environment.parse(template)
    except Exception as error:  # as above
        raise _refused(error) from error
    return frozenset(jinja2.meta.find_undeclared_variables(tree))


def preload() -> None:
    """Import the renderer: for a thread beside the loading of the model, so that no request waits for it."""
    _renderer()


def warm_up(template: str) -> None:
    """Import the renderer and compile ``template``. A template with a syntax error is reported by the first request."""
    try:
        render(
            template,
            [{"role": "user", "content": ""}],
            tools=None,
            special_tokens={},
            add_generation_prompt=True,
            continue_final_message=False,
        )
    except RequestError:
        return  # some templates refuse an empty message; what counts is compiled


def _renderer() -> Callable[..., tuple[list[str], list[Any]]]:
    """transformers' renderer. The import takes two seconds, nearly all of it transformers' own start."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it would tell the user that PyTorch is missing
    from transformers.utils.chat_template_utils import render_jinja_template

    return render_jinja_template  # type: ignore[return-value]  # annotated as str; it returns a pair


def _refused(error: Exception) -> RequestError:
    return RequestError(f"the model's chat template refused the messages: {error}", param="messages")


def _check_kwargs(template: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in kwargs.items():
        param = f"chat_template_kwargs.{name}"
        if name not in SAFE_KWARGS:
            raise RequestError(f"{param} can't be set by a request: {', '.join(SAFE_KWARGS)} can", param=param)
        if type(value) is not SAFE_KWARGS[name]:
            kind = SAFE_KWARGS[name].__name__
            raise RequestError(f"{param} must be of type {kind}, got {validation.shown(value)}", param=param)
        if name not in variables(template):
            raise RequestError(f"{param}: this model's chat template does not read it: leave it out", param=param)
    return dict(kwargs)


def _check_list(messages: object) -> Sequence[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", param="messages")
    if not messages:
        raise RequestError("messages must hold at least one message, got none", param="messages")
    return messages


def _check_message(index: int, message: object) -> dict[str, Any]:
    """A plain dict without None values (templates would print "None"), text parts joined to one string."""
    if not isinstance(message, Mapping):
        raise RequestError(f"messages[{index}] must be an object, got {type(message).__name__}", param="messages")
    if not isinstance(message.get("role"), str):
        raise RequestError(f"messages[{index}] needs a string 'role', got {message.get('role')!r}", param="messages")
    checked = {key: value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = _content_text(index, checked["content"])
    return checked


def _content_text(index: int, content: object) -> str:
    """OpenAI clients send a string or a list of parts; the models here read text only. Parts are joined by newlines."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError(
            f"messages[{index}].content must be a string or a list of parts, got {type(content).__name__}",
            param="messages",
        )
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"messages[{index}].content holds a part of type {kind!r}; only text parts are supported",
                param="messages",
            )
        texts.append(part["text"])
    return "\n".join(texts)
