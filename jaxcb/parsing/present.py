"""Tools for models whose chat template presents none: told in the system message, in the words of Hermes 2 Pro
(NousResearch 2024), and read by its parser."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxcb.parsing.hermes import BEGIN, END

_INTRODUCTION = """\
You can call functions to help with the user's request. The functions, one JSON object a line, inside <tools></tools>:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object inside {begin}{end}, and nothing else:
{begin}
{{"name": "<function>", "arguments": {{<arguments>}}}}
{end}"""


def as_text(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages with ``tools`` in the system message (if there are any), calls and results as text."""
    texts = [_message(message) for message in messages]
    if not tools:
        return texts
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    introduction = _INTRODUCTION.format(tools=lines, begin=BEGIN, end=END)
    if texts and texts[0]["role"] == "system":
        content = "\n\n".join(filter(None, [texts[0].get("content"), introduction]))
        return [{**texts[0], "content": content}, *texts[1:]]
    return [{"role": "system", "content": introduction}, *texts]


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{BEGIN}\n{json.dumps(call['function'], ensure_ascii=False)}\n{END}"
        for call in message.get("tool_calls") or ()
    ]
    if not calls:
        return dict(message)
    rest = {key: value for key, value in message.items() if key not in ("tool_calls", "content")}
    return {**rest, "content": "\n".join(filter(None, [content, *calls]))}
