"""evalscope perf: a load of random prompts, streamed."""

from __future__ import annotations

from typing import Any

from .conftest import needs

pytestmark = needs("evalscope")


def test_every_request_of_a_load_is_answered(said: dict[str, Any]) -> None:
    summary = said["evalscope"]
    assert "error" not in summary, summary["error"]
    assert summary["Success Requests"] == 8
    assert (summary["Failed Requests"], summary["Avg Output Tokens"]) == (0, 8)
