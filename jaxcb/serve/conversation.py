"""A conversation on its way to token ids: what all endpoints that take messages have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxcb.errors import RequestError
from jaxcb.parsing import TOOL_PARSERS, Reading
from jaxcb.parsing.choose import ToolFormat
from jaxcb.parsing.forced import ForcedParser
from jaxcb.parsing.present import as_text
from jaxcb.serve.constrain import constraint
from jaxcb.serve.tools import ToolChoice
from jaxcb.structured_outputs import StructuredOutputs

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")

if TYPE_CHECKING:
    from jaxcb.serve.service import Service


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """``messages`` are as :meth:`jaxcb.text.Tokenizer.render_chat` takes them."""

    messages: Sequence[Mapping[str, Any]]
    choice: ToolChoice = dataclasses.field(default_factory=ToolChoice)
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def render(self, service: Service) -> str:
        """The prompt's text, by the model's own template. One that knows no tools is given them as text.

        Raises:
            RequestError: there is no template, it refuses the messages, or there are too many.
        """
        if len(self.messages) > service.max_model_len:  # not worth minutes of a template's time
            raise RequestError(
                f"messages holds {len(self.messages)} messages, more than the model's context of "
                f"{service.max_model_len} tokens can hold",
                param="messages",
            )
        tokenizer, tools = service.engine.tokenizer, self.choice.usable()
        messages = self.messages
        about_tools = tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if about_tools and not tokenizer.reads("tools"):
            messages, tools = as_text(messages, tools), []
        return tokenizer.render_chat(
            messages,
            tools=tools or None,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template_kwargs=self.template_kwargs,
        )

    def format(self, service: Service) -> ToolFormat:
        """How the model writes calls."""
        return service.tool_format or TOOL_PARSERS["hermes"]

    def reading(self, service: Service, prompt: str) -> Reading:
        """How answers to ``prompt``, the rendered text, are read."""
        choice = self.choice
        parser = None
        if choice.mode != "none":
            parser = ForcedParser if choice.forced else self.format(service).parser
        markers = service.reasoning
        return Reading(
            names=frozenset(tool.name for tool in choice.tools),
            schemas={tool.name: tool.parameters for tool in choice.tools},
            tools=parser,
            parallel=choice.parallel,
            reasoning=markers,
            begins_in_reasoning=markers is not None and markers.open_after(prompt),
        )

    def with_effort(self, effort: str | None, service: Service) -> Conversation:
        """With OpenAI's ``reasoning_effort``, in the words of the model's template: some know efforts, some can only
        think or not.

        Raises:
            RequestError: the template knows no such thing.
        """
        if effort is None:
            return self
        reads = service.engine.tokenizer.reads
        if effort not in EFFORTS:
            raise RequestError(
                f"reasoning_effort must be {', '.join(EFFORTS)}, got {effort[:40]!r}", param="reasoning_effort"
            )
        if reads("reasoning_effort") and effort != "none":
            more: dict[str, Any] = {"reasoning_effort": effort}
        elif switch := next((name for name in ("enable_thinking", "thinking") if reads(name)), None):
            more = {switch: effort != "none"}
        else:
            raise RequestError(
                "reasoning_effort is not supported: this model's chat template reads none; leave it out",
                param="reasoning_effort",
            )
        return dataclasses.replace(self, template_kwargs={**more, **self.template_kwargs})

    def sampling(self, service: Service, prompt: str, wanted: StructuredOutputs | None = None) -> dict[str, Any]:
        """What the parsers and the choice of a tool ask of the sampling parameters of answers to ``prompt``, which the
        body wants held to a language.

        Raises:
            RequestError: see :func:`jaxcb.serve.constrain.constraint`.
        """
        marks: list[str] = []
        if self.choice.mode == "auto":
            marks += self.format(service).marks
        if service.reasoning is not None:
            marks += (service.reasoning.begin, service.reasoning.end)
        asked: dict[str, Any] = {}
        if any(map(service.engine.tokenizer.is_special, marks)):
            asked["skip_special_tokens"] = False  # the parser has to see them; it takes them out itself
        language = constraint(self.choice, self.format(service), wanted, service, prompt)
        return asked | {"structured_outputs": language}
