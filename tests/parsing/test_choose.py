"""Which parsers a chat template asks for."""

from __future__ import annotations

import re

import pytest

from jaxcb.errors import ConfigError
from jaxcb.parsing import REASONING_PARSERS, TOOL_PARSERS, reasoning_markers, tool_format
from jaxcb.parsing.choose import TOOL_ALIASES

LOOP = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEMPLATES = {
    "hermes": "{% if tools %}call with <tool_call>{% endif %}" + LOOP,
    "qwen3_coder": "{% if tools %}call with <tool_call>\n<function=x>{% endif %}" + LOOP,
    "mistral": "{% if tools %}[AVAILABLE_TOOLS]{% endif %}{{ '[TOOL_CALLS]' }}" + LOOP,
    "llama3_json": '{% if tools %}{{ \'{"name": x, "parameters": \' }}{% endif %}' + LOOP,
    "pythonic": "{% if tools %}[func_name1(params_name1=v)]{% endif %}" + LOOP,
    "gemma": "{% if tools %}<start_function_call>{% endif %}" + LOOP,
}


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_that_presents_tools_is_recognised(name: str) -> None:
    assert tool_format("auto", TEMPLATES[name]) is TOOL_PARSERS[name]
    assert tool_format("none", TEMPLATES[name]) is None


@pytest.mark.parametrize("template", [None, LOOP, "<tool_call>" + LOOP])
def test_other_templates_have_no_parser(template: str | None) -> None:
    assert tool_format("auto", template) is None


def test_names_of_other_servers_are_understood() -> None:
    assert {tool_format(alias, None) for alias in TOOL_ALIASES} <= set(TOOL_PARSERS.values())


def test_reasoning_is_recognised_by_its_end_marker() -> None:
    assert reasoning_markers("auto", "{{ content.split('</think>')[-1] }}") is REASONING_PARSERS["qwen3"]
    assert reasoning_markers("auto", "[THINK]{{ x }}[/THINK]") is REASONING_PARSERS["mistral"]
    assert reasoning_markers("auto", LOOP) is None and reasoning_markers("auto", None) is None
    assert reasoning_markers("deepseek_r1", None) is REASONING_PARSERS["deepseek_r1"]
    assert reasoning_markers("none", "</think>") is None


def test_unknown_names_are_refused_with_those_there_are() -> None:
    for choose, known in ((tool_format, "hermes"), (reasoning_markers, "qwen3")):
        with pytest.raises(ConfigError, match=known):
            choose("nobody", None)


@pytest.mark.parametrize(
    ("prompt", "qwen3", "deepseek_r1"),
    [
        ("<|assistant|>\n", False, True),
        ("<|assistant|>\n<think>\n", True, True),
        ("<|assistant|>\n<think>\n\n</think>\n\n", False, False),
        ("x</think>y<|assistant|>\n", False, True),
    ],
)
def test_the_prompt_says_whether_the_answer_begins_in_the_reasoning(
    prompt: str, qwen3: bool, deepseek_r1: bool
) -> None:
    assert REASONING_PARSERS["qwen3"].open_after(prompt) is qwen3
    assert REASONING_PARSERS["deepseek_r1"].open_after(prompt) is deepseek_r1


def test_ids_of_calls_have_the_form_that_templates_take() -> None:
    assert re.fullmatch(r"[A-Za-z0-9]{9}", TOOL_PARSERS["mistral"].new_id())
    assert re.fullmatch(r"call_[0-9a-f]{24}", TOOL_PARSERS["hermes"].new_id())
