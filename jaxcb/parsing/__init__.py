"""Takes a model's answer apart: reasoning, text, calls of tools. No request, no engine, no HTTP.

Every parser reads its answer character by character and decides nothing before it is certain, so the events of an
answer do not depend on how it was cut into pieces: a whole answer is parsed by the same code as a stream.
"""

from jaxcb.parsing.answer import Answer, AnswerParser, Reading, ToolCall
from jaxcb.parsing.choose import REASONING_PARSERS, TOOL_PARSERS, reasoning_markers, tool_format
from jaxcb.parsing.events import CallArguments, CallStart, Event, Reasoning, Text

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "Answer",
    "AnswerParser",
    "CallArguments",
    "CallStart",
    "Event",
    "Reading",
    "Reasoning",
    "Text",
    "ToolCall",
    "reasoning_markers",
    "tool_format",
]
