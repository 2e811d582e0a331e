"""Answers of every format, whole and in pieces: the parts never depend on where the pieces were cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.parsing import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    Answer,
    AnswerParser,
    CallArguments,
    CallStart,
    Reading,
    ToolCall,
)
from jaxcb.parsing.answer import fold
from jaxcb.parsing.forced import ForcedParser

NAMES = frozenset({"weather", "add", "get.time"})
SCHEMAS: dict[str, Any] = {
    "weather": {"properties": {"city": {"type": "string"}}},
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "array"}}},
    "get.time": {
        "properties": {
            "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "exact": {"type": "boolean"},
            "step": {"type": ["number", "string"]},
            "unit": {"enum": ["s", 60]},
        }
    },
}
PARSERS = {name: tools.parser for name, tools in TOOL_PARSERS.items()} | {"forced": ForcedParser}

ONE = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS = ToolCall("weather", '{"city": "Paris"}')
SUM = ToolCall("add", '{"a": 1, "b": [2, {"c": "}]"}]}')


def qwen_call(name: str, **values: Any) -> str:
    """As Qwen3-Coder writes it."""
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


LIST = '[2, {"c": "}]"}]'
QWEN = "<function=weather><parameter=city>Paris</parameter></function>"
PARIS_XY = ToolCall("weather", '{"city": "Paris", "x": "y"}')
TORN = ToolCall("weather", '{"city": "Paris</tool_call>')
CASES: list[tuple[str, str, str, list[ToolCall]]] = [
    ("hermes", f"<tool_call>\n{ONE}\n</tool_call>", "", [PARIS]),
    ("hermes", f"Let me see.\n<tool_call>{ONE}</tool_call>\n", "Let me see.", [PARIS]),
    (
        "hermes",
        f'<tool_call>{ONE}</tool_call>\n<tool_call>{{"name":"add","arguments":{SUM.arguments}}}</tool_call> Done.\n',
        "Done.\n",
        [PARIS, SUM],
    ),
    (
        "hermes",
        f'<tool_call>[{ONE}, {{"name": "add", "arguments": {{}}}}]</tool_call>',
        "",
        [PARIS, ToolCall("add", "{}")],
    ),
    ("hermes", '<tool_call>{"arguments": {"city": "Paris"}, "name": "weather"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"id": 7, "name": "weather"}</tool_call>', "", [ToolCall("weather", "{}")]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>', "", [PARIS]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": null}</tool_call>', "", [ToolCall("weather", "{}")]),
    (
        "hermes",
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
        [],
    ),
    ("hermes", f"<tool_call>sorry <tool_call>{ONE}</tool_call>", "<tool_call>sorry", [PARIS]),
    ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": "Par', "", [ToolCall("weather", '{"city": "Par')]),
    ("hermes", '<tool_call>{"name": "wea', '<tool_call>{"name": "wea', []),
    ("hermes", "a < b and <tool", "a < b and <tool", []),
    ("hermes", f"<tool_call>{ONE} and more", "", [PARIS]),
    ("llama3_json", '{"name": "weather", "parameters": {"city": "Paris"}}', "", [PARIS]),
    ("llama3_json", f'<|python_tag|>{ONE}; {{"name": "add", "parameters": {SUM.arguments}}}', "", [PARIS, SUM]),
    ("llama3_json", f"I look it up: <|python_tag|>{ONE}", "I look it up:", [PARIS]),
    ("llama3_json", '{"name": "Ann", "age": 3}', '{"name": "Ann", "age": 3}', []),
    ("llama3_json", ' {"age": 3} years', ' {"age": 3} years', []),
    ("llama3_json", "Paris {x} <|python", "Paris {x} <|python", []),
    ("mistral", f"[TOOL_CALLS][{ONE}]", "", [PARIS]),
    ("mistral", f'Well. [TOOL_CALLS] [{ONE}, {{"name": "add", "arguments": {SUM.arguments}}}]', "Well.", [PARIS, SUM]),
    ("mistral", f'[TOOL_CALLS]weather[ARGS]{{"city": "Paris"}}[TOOL_CALLS]add{SUM.arguments}', "", [PARIS, SUM]),
    ("mistral", '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Paris"}', "", [PARIS]),
    ("mistral", "[TOOL_CALLS]nobody{}", "nobody{}", []),
    ("mistral", "no [TOOL", "no [TOOL", []),
    ("pythonic", '[weather(city="Paris")]', "", [PARIS]),
    ("pythonic", "[weather(city='Paris'), add(a=1, b=[2, {'c': '}]'}])]", "", [PARIS, SUM]),
    (
        "pythonic",
        '<|python_start|>[get.time(zone="a, (b)", exact=true, at=None)]',
        "",
        [ToolCall("get.time", '{"zone": "a, (b)", "exact": true, "at": null}')],
    ),
    ("pythonic", "[1, 2]", "[1, 2]", []),
    ("pythonic", "[weather(Paris)]", "[weather(Paris)]", []),
    ("pythonic", "[weather(city=open('x'))]", "[weather(city=open('x'))]", []),
    ("pythonic", "[nobody()] x", "[nobody()] x", []),
    ("pythonic", "[" * 50, "[" * 50, []),
    ("pythonic", "Paris [weather()]", "Paris [weather()]", []),
    ("gemma", "<start_function_call>call:weather{city:<escape>Paris<escape>}<end_function_call>", "", [PARIS]),
    (
        "gemma",
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>}<tool_call|>'
        '<|tool_call>call:add{a:1,b:[2,{c:<|"|>}]<|"|>}]}<tool_call|>',
        "",
        [PARIS, SUM],
    ),
    ("gemma", 'Fine.\n```tool_code\nweather(city="Paris")\n```', "Fine.", [PARIS]),
    ("gemma", '```tool_code\nprint(weather(city="Paris"))\n```', "", [PARIS]),
    (
        "gemma",
        "<start_function_call>call:weather{}<end_function_call><start_function_response>rain",
        "",
        [ToolCall("weather", "{}")],
    ),
    ("gemma", "<start_function_call>call:weather{city:<escape>Paris<escape>}", "", [PARIS]),
    ("gemma", "<start_function_call>call:weather{city:", "<start_function_call>call:weather{city:", []),
    ("gemma", "<start_function_call>call:add{a:" + "[" * 99, "<start_function_call>call:add{a:" + "[" * 99, []),
    ("qwen3_coder", qwen_call("weather", city="Paris"), "", [PARIS]),
    (
        "qwen3_coder",
        "Let me see.\n" + qwen_call("weather", city="Paris") + "\n" + qwen_call("add", a=1, b=LIST) + "\n",
        "Let me see.",
        [PARIS, SUM],
    ),
    ("qwen3_coder", "<function=weather><parameter=city>Paris</parameter></function> Done.", "Done.", [PARIS]),
    ("qwen3_coder", f"<tool_call>{QWEN}{QWEN}</tool_call>", "", [PARIS, PARIS]),
    ("qwen3_coder", "<tool_call>\n<function=weather>\n<parameter=city>\nParis</tool_call>", "", [TORN]),
    ("qwen3_coder", "<function=weather><parameter=city>Paris<parameter=x>y</function>", "", [PARIS_XY]),
    ("qwen3_coder", "<tool_call><function=weather></tool_call> x", "x", [ToolCall("weather", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=nobody>\n</function>", "<tool_call>\n<function=nobody>\n</function>", []),
    ("qwen3_coder", "<tool_call> <tool_call>" + QWEN, "<tool_call>", [PARIS]),
    ("qwen3_coder", "a <b> <function= c", "a <b> <function= c", []),
    ("qwen3_coder", "<tool_call>\n<function=wea", "<tool_call>\n<function=wea", []),
    ("qwen3_coder", "<tool_call><function=weather><parameter=city>\nPar\n", "", [ToolCall("weather", '{"city": "Par')]),
    ("qwen3_coder", qwen_call("weather", city='"\n\n é\\'), "", [ToolCall("weather", '{"city": "\\"\\n\\n é\\\\"}')]),
    ("qwen3_coder", qwen_call("weather", city=""), "", [ToolCall("weather", '{"city": ""}')]),
    (
        "qwen3_coder",
        qwen_call("get.time", at="null", exact="True", step="1e3", unit="60", zone="null"),
        "",
        [ToolCall("get.time", '{"at": null, "exact": true, "step": 1000.0, "unit": 60, "zone": "null"}')],
    ),
    (
        "qwen3_coder",
        qwen_call("get.time", at="5", exact="perhaps", step="fast", unit="s"),
        "",
        [ToolCall("get.time", '{"at": "5", "exact": "perhaps", "step": "fast", "unit": "s"}')],
    ),
    ("qwen3_coder", qwen_call("add", a="1.5", b="{'x': 1}"), "", [ToolCall("add", '{"a": "1.5", "b": "{\'x\': 1}"}')]),
    ("qwen3_coder", qwen_call("add", b="['x', None]"), "", [ToolCall("add", '{"b": ["x", null]}')]),
    ("forced", f'[{ONE}, {{"name": "add", "arguments": {SUM.arguments}}}]', "", [PARIS, SUM]),
]


def pieces(text: str, cuts: list[int]) -> list[str]:
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def streamed(reading: Reading, parts: list[str]) -> Answer:
    """The answer from pieces, after checking that calls come in order and each begins before its arguments."""
    parser = AnswerParser(reading)
    events = [event for part in parts for event in parser.feed(part)] + parser.finish()
    numbers = [event.index for event in events if isinstance(event, CallStart | CallArguments)]
    assert numbers == sorted(numbers)
    starts = [event.index for event in events if isinstance(event, CallStart)]
    assert starts == list(range(len(starts)))
    return fold(events)


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_an_answer_is_taken_apart(name: str, text: str, content: str, calls: list[ToolCall]) -> None:
    reading = Reading(names=NAMES, schemas=SCHEMAS, tools=PARSERS[name])
    assert reading.parse(text) == Answer("", content, calls)


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES])
def test_the_parts_do_not_depend_on_single_cuts(name: str, text: str) -> None:
    reading = Reading(names=NAMES, schemas=SCHEMAS, tools=PARSERS[name])
    whole = reading.parse(text)
    assert streamed(reading, list(text)) == whole
    for cut in range(len(text)):
        assert streamed(reading, [text[:cut], text[cut:]]) == whole


FRAGMENTS = [
    *(text for _, text, _, _ in CASES),
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "[THINK]"),
    *("<function=", "<parameter=city>\n", "\n</parameter>", "</function>", "<function=add>", "<parameter=a>"),
    *("<start_function_call>", "<end_function_call>", "<|tool_call>", "<tool_call|>", "```tool_code\n", "```"),
    *('{"name": "weather"', ', "arguments": {"a": "\\"}', '"}', "}", "{", "[", "]", ",", ";", '"', "\\", " ", "\n"),
    *("weather", "add(", ")", "call:add{", "é", "🙂", "x"),
]
TEXTS = st.lists(st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=300, deadline=None, print_blob=True)
@given(
    text=TEXTS,
    cuts=st.lists(st.integers(0, 400), max_size=12),
    parser=st.sampled_from(sorted(PARSERS)),
    thinking=st.sampled_from([None, *sorted(REASONING_PARSERS)]),
    inside=st.booleans(),
    parallel=st.booleans(),
)
def test_the_parts_do_not_depend_on_any_cuts(
    text: str, cuts: list[int], parser: str, thinking: str | None, inside: bool, parallel: bool
) -> None:
    reading = Reading(
        names=NAMES,
        schemas=SCHEMAS,
        tools=PARSERS[parser],
        parallel=parallel,
        reasoning=None if thinking is None else REASONING_PARSERS[thinking],
        begins_in_reasoning=inside,
    )
    whole = reading.parse(text)
    assert streamed(reading, pieces(text, cuts)) == whole
    assert streamed(reading, list(text)) == whole
    assert len(whole.calls) <= 1 or parallel


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, print_blob=True)
@given(
    arguments=st.dictionaries(st.text(max_size=6), JSON, max_size=4),
    ascii_only=st.booleans(),
    parser=st.sampled_from(["hermes", "llama3_json", "mistral", "forced"]),
)
def test_any_arguments_come_out_as_they_were_written(arguments: Any, ascii_only: bool, parser: str) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    begin, end = {
        "hermes": ("<tool_call>\n", "\n</tool_call>"),
        "llama3_json": ("", ""),
        "mistral": ("[TOOL_CALLS][", "]"),
        "forced": ("[", "]"),
    }[parser]
    text = f'{begin}{{"name": "add", "arguments": {written}}}{end}'
    assert Reading(names=NAMES, schemas=SCHEMAS, tools=PARSERS[parser]).parse(text) == Answer(
        "", "", [ToolCall("add", written)]
    )


@settings(max_examples=150, deadline=None, print_blob=True)
@given(values=st.dictionaries(st.text("ab_é", min_size=1, max_size=6), JSON, min_size=1, max_size=4))
def test_any_values_between_tags_come_out_as_their_schema_says(values: dict[str, Any]) -> None:
    """Strings stand there as they are, all others as JSON."""
    if any(tag in str(value) for value in values.values() for tag in ("</parameter>", "<parameter=", "</function>")):
        return
    kinds = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
    properties = {name: {"type": kinds.get(type(value), "null")} for name, value in values.items()}
    text = qwen_call("add", **{n: v if isinstance(v, str) else json.dumps(v) for n, v in values.items()})
    reading = Reading(names=NAMES, schemas={"add": {"properties": properties}}, tools=PARSERS["qwen3_coder"])
    [call] = reading.parse(text).calls
    assert json.loads(call.arguments) == values
    assert streamed(reading, list(text)).calls == [call]


@pytest.mark.parametrize(
    ("name", "inside", "text", "reasoning", "content"),
    [
        ("qwen3", False, "<think>\nWell.\n</think>\n\nParis.", "Well.", "Paris."),
        ("qwen3", False, "\n<think>a</think>b", "a", "b"),
        ("qwen3", False, "Paris. <think>x</think>", "", "Paris. <think>x</think>"),
        ("qwen3", True, "Well.\n</think>\n\nParis.\n", "Well.", "Paris.\n"),
        ("qwen3", True, "<think>Well.</think>Paris.", "Well.", "Paris."),
        ("qwen3", True, "Well, <thi", "Well, <thi", ""),
        ("qwen3", True, "a\n\nb </thin", "a\n\nb </thin", ""),
        ("qwen3", False, "<thin", "", "<thin"),
        ("qwen3", False, "  ", "", "  "),
        ("mistral", False, "[THINK]a[/THINK]b", "a", "b"),
    ],
)
def test_reasoning_is_separated(name: str, inside: bool, text: str, reasoning: str, content: str) -> None:
    reading = Reading(reasoning=REASONING_PARSERS[name], begins_in_reasoning=inside)
    assert reading.parse(text) == Answer(reasoning, content, [])


def test_calls_come_behind_the_reasoning() -> None:
    reading = Reading(names=NAMES, schemas=SCHEMAS, tools=PARSERS["hermes"], reasoning=REASONING_PARSERS["qwen3"])
    answer = reading.parse(f"<think>Maybe <tool_call>?</think>\nSo:\n<tool_call>{ONE}</tool_call>")
    assert answer == Answer("Maybe <tool_call>?", "So:", [PARIS])


@pytest.mark.parametrize("parser", sorted(PARSERS))
def test_an_answer_without_calls_keeps_its_every_space(parser: str) -> None:
    text = "  Paris is\n\n the capital. \n"
    assert Reading(names=NAMES, schemas=SCHEMAS, tools=PARSERS[parser]).parse(text).text == (
        "" if parser == "forced" else text
    )


def test_arguments_are_given_on_before_they_are_complete() -> None:
    parser = AnswerParser(Reading(names=NAMES, schemas=SCHEMAS, tools=PARSERS["hermes"]))
    assert parser.feed('<tool_call>{"name": "weather"') == [CallStart(0, "weather")]
    assert parser.feed(', "arguments": {"city": "Pa') == [CallArguments(0, '{"city": "Pa')]
