"""A client of the application around a fake engine that says what it is told to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.testclient import TestClient

from jaxcb.serve.app import make_app

from .fake_engine import FakeEngine

CALLS = (
    'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": [1, 2]}}\n</tool_call>'
)
"""An answer that calls two tools."""
THOUGHT = "<think>\nHm.\n</think>\n\nParis."


@contextmanager
def serving(answer: str, **options: Any) -> Iterator[tuple[TestClient, FakeEngine]]:
    engine = FakeEngine(answer=answer, max_model_len=2000)
    with TestClient(make_app(engine, **options)) as client:
        yield client, engine


def prompt_of(engine: FakeEngine) -> str:
    """The text of the last prompt."""
    return "".join(map(chr, engine.requests[-1].prompt_token_ids))
