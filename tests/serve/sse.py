"""Reads server-sent events the way the OpenAI clients do."""

from __future__ import annotations

import json
from typing import Any


def events(text: str) -> list[dict[str, Any]]:
    """The JSON events of a whole stream, which must end with ``[DONE]`` and hold nothing else."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the stream ends in the middle of an event"
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks), text
    data = [block.removeprefix("data: ") for block in blocks]
    assert data.pop() == "[DONE]"
    return [json.loads(event) for event in data]


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a stream whose events have names, each of which must be the type of its data."""
    blocks = text.split("\n\n")
    assert blocks.pop() == "", "the stream ends in the middle of an event"
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found
