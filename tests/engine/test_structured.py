"""Answers that are held to a language, by a model that would say anything: "stop" means that the text is in it."""

from __future__ import annotations

import json
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.engine import Engine
from jaxcb.errors import RequestError
from jaxcb.request import FinishReason, Request, RequestOutput, SamplingParams
from jaxcb.sampling_params import StructuredOutputs
from tests.engine.conftest import SPEC
from tests.engine.run import complete
from tests.grammar.schemas import SCHEMAS

PAGES = {"num_kv_pages": 44, "admission_watermark": 0.0}
"""Eight answers of a hundred tokens find no room together."""
END = 1
"""``</s>``, which this model has for an end token where a request says so."""


def prompt(seed: int, length: int = 12) -> list[int]:
    return np.random.default_rng(seed).integers(2, SPEC.vocab_size - 8, length).tolist()


def held_to(sampling: dict[str, object] | None = None, **fields: object) -> SamplingParams:
    values = {"temperature": 1.0, "max_tokens": 120} | (sampling or {})
    return SamplingParams(structured_outputs=StructuredOutputs(**fields), **values)


def check(output: RequestOutput, schema: dict[str, object]) -> bool:
    """Whether it came to its end; then it is valid. A stop string of the request's own cuts it short."""
    assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output.error
    if isinstance(output.stop_reason, str):
        assert output.stop_reason not in output.text
        return False
    if output.finish_reason is FinishReason.STOP:
        jsonschema.validate(json.loads(output.text), schema)
    return output.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("run_ahead", [True, False])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(schemas=st.lists(SCHEMAS, min_size=2, max_size=6), seed=st.integers(0, 2**31))
def test_answers_of_random_schemas_are_valid_whatever_shares_the_batch(make_engines, run_ahead, schemas, seed):
    """Beside free requests, with pages for half of them, and every parameter that could get in the way."""
    engine = make_engines(**PAGES, run_ahead=run_ahead)
    rng = np.random.default_rng(seed)
    ways: list[dict[str, object]] = [
        {"seed": int(rng.integers(1000)), "stop_token_ids": (END,)},
        {"temperature": 0.0, "stop_token_ids": (END,)},
        {"logprobs": 2, "seed": 1},
        {"repetition_penalty": 1.3, "temperature": 0.0},
        {"min_tokens": 20, "seed": 2, "stop_token_ids": (END,)},
        {"stop": ("a", "]"), "seed": 3},
        {"ignore_eos": True, "seed": 4},
        {"stop_token_ids": (0,), "seed": 5},
        {"logit_bias": {i: -100.0 for i in range(10, 40)}, "seed": 6},
    ]
    params = [held_to(ways[rng.integers(len(ways))], json=schema) for schema in schemas]
    free = SamplingParams(temperature=1.0, seed=7, max_tokens=60, ignore_eos=True)
    outputs = complete(engine, [prompt(seed + i) for i in range(len(schemas) + 3)], [*params, free, free, free])
    for schema, output in zip(schemas, outputs, strict=False):
        check(output, schema)
    for output in outputs[len(schemas) :]:
        assert len(output.token_ids) == 60


def test_masks_are_filled_while_the_forward_runs_and_are_of_the_rows_that_have_one(make_engines, monkeypatch):
    """Before the sampler, after the forward was launched, which nobody waits for."""
    engine: Engine = make_engines()
    core, log = engine._core, []

    def logged(owner, name, note):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: log.append((name, *note(args))) or real(*args))

    logged(core.runner, "forward", lambda args: (args[0].num_rows,))
    logged(core.runner, "sample", lambda args: () if len(args) < 2 else (tuple(args[1].rows), len(args[1].words)))
    logged(core.constraints, "masks", lambda args: (len(args[0]),))
    free = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    params = [
        free,
        held_to({"max_tokens": 12}, regex="[a-z ]+"),
        free,
        held_to({"max_tokens": 12}, regex="[A-Z]+"),
        free,
    ]
    complete(engine, [prompt(i) for i in range(5)], params)
    steps = [log[at : at + 3] for at, entry in enumerate(log) if entry[0] == "forward" and log[at + 1][0] == "masks"]
    assert len(steps) >= 11
    for forward, masks, sample in steps:
        assert (forward[0], masks[0], sample[0]) == ("forward", "masks", "sample")
        assert len(sample[1]) == sample[2] <= masks[1] <= 2
    assert {forward[1] for forward, _, _ in steps} >= {5} and max(sample[2] for *_, sample in steps) == 2


RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TRUE = {"const": True}


@pytest.mark.parametrize(
    ("schema", "sampling"),
    [
        (RECORD, {}),
        (RECORD, {"max_tokens": 3, "temperature": 0.0}),
        (RECORD, {"stop": ("}",)}),
        (RECORD, {"stop": ("\n",)}),
        (RECORD, {"ignore_eos": True}),
        (TRUE, {"min_tokens": 50}),
    ],
    ids=["plain", "three tokens", "stop }", "stop line", "ignore_eos", "min_tokens"],
)
def test_an_answer_is_a_document_or_the_beginning_of_one(make_engines, schema, sampling):
    """HB-40 (kekzl/imp#1199, omlx#2990, vllm#38696, vllm#54218)."""
    engine = make_engines()
    ends = {} if "ignore_eos" in sampling else {"stop_token_ids": (END,)}
    wishes = [held_to({"max_tokens": 256, "seed": seed} | ends | sampling, json=schema) for seed in range(6)]
    for output in complete(engine, [prompt(seed) for seed in range(6)], wishes):
        assert not re.search(r"\s{65}", output.text)
        whole = check(output, schema)
        if not whole:
            matcher = engine._grammars.compile(wishes[0].structured_outputs).matcher.deep_copy()
            assert matcher.consume_tokens(list(output.token_ids)[: -1 if output.stop_reason else None])
        assert whole or schema is RECORD
        if sampling.get("max_tokens") == 3:
            assert output.finish_reason is FinishReason.LENGTH and len(output.token_ids) == 3


def test_the_answer_is_the_same_alone_and_in_a_full_engine_short_of_pages(make_engines):
    prompts = [prompt(i, 40) for i in range(8)]
    params = [held_to({"seed": i}, regex="so: ([a-z ]{20},){4}( and that is all there is| or so)") for i in range(8)]
    alone = [complete(make_engines(), [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    together = complete(make_engines(**PAGES), prompts, params)
    assert sum(output.num_preemptions for output in together) > 0
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert {output.finish_reason for output in alone} == {FinishReason.STOP}


def test_several_answers_share_a_prompt_and_draw_their_own(make_engines):
    engine = make_engines()
    sampling = held_to({"n": 5, "seed": 1}, json={"type": "integer", "minimum": 1, "maximum": 10**12})
    streams = engine.submit_choices(Request(request_id="n", prompt_token_ids=prompt(3, 40), sampling=sampling))
    outputs = [list(stream)[-1] for stream in streams]
    assert all(check(output, {"type": "integer"}) for output in outputs)
    assert len({output.text for output in outputs}) > 1


def test_forced_tokens_take_no_step_of_their_own(make_engines):
    """The choice is decided by its first letter; what follows is known."""
    engine = make_engines()
    fields = {"choice": ("yes, it is so, and nobody doubts it", "no, it is not, whatever they say of it")}
    steps = engine.stats().steps
    [output] = complete(engine, [prompt(5)], held_to({"seed": 1}, **fields))
    assert output.text in fields["choice"] and output.finish_reason is FinishReason.STOP
    assert engine.stats().steps - steps < 8 < len(output.token_ids)
    steps = engine.stats().steps
    [other] = complete(engine, [prompt(5)], held_to({"seed": 1, "logprobs": 0}, **fields))
    assert len(other.logprobs) == len(other.token_ids), "each token's own log-probability is asked for"
    assert other.text in fields["choice"]


def test_a_thinking_model_writes_freely_up_to_the_marker(make_engines):
    """Its marker is a byte that comes up often here."""
    engine = make_engines()
    end = engine.tokenizer.encode("~")[0]
    sampling = held_to(
        {"seed": 2, "temperature": 50.0, "logit_bias": {end: 100.0}, "stop_token_ids": (END,)},
        regex="(yes|no)[ab]*",
        reasoning_end="~",
    )
    outputs = complete(engine, [prompt(i) for i in range(4)], sampling)
    assert any(output.finish_reason is FinishReason.STOP for output in outputs)
    assert any(output.text.find("~") > 0 for output in outputs)
    for output in outputs:
        if output.finish_reason is FinishReason.STOP:
            assert re.fullmatch(r"[^~]*~(yes|no)[ab]*", output.text, re.DOTALL), output.text


def test_a_stop_string_of_the_request_ends_the_answer_wherever_it_comes(make_engines):
    """kekzl/imp#1199, omlx#2990: what the request asks for by itself goes first, and the answer says that it did."""
    engine = make_engines()
    nested = {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 1}, "minItems": 3}
    for seed in range(4):
        [whole] = complete(engine, [prompt(seed)], held_to({"seed": seed}, json=nested))
        [output] = complete(engine, [prompt(seed)], held_to({"seed": seed, "stop": ("]",)}, json=nested))
        assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "]")
        assert output.text == whole.text[: whole.text.index("]")]


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"allowed_token_ids": (5, 6)}, FinishReason.ERROR),
        ({"min_tokens": 50}, FinishReason.STOP),
        ({"ignore_eos": True}, FinishReason.STOP),
    ],
)
def test_where_the_grammar_and_a_parameter_leave_nothing_the_answer_ends(make_engines, sampling, reason):
    engine = make_engines()
    [output] = complete(engine, [prompt(0)], held_to(sampling, regex="(ab|cd){2}"))
    assert output.finish_reason is reason
    if reason is FinishReason.STOP:
        assert re.fullmatch("(ab|cd){2}", output.text)
    else:
        assert "allow" in output.error or "no token could be sampled" in output.error
    assert engine.healthy


@pytest.mark.parametrize("run_ahead", [True, False])
@pytest.mark.parametrize("regex", ["ab", "(so|no), that is it", "(ab|cd){2}"])
def test_forced_tokens_up_to_the_end_are_all_there_is(make_engines, regex, run_ahead):
    """By a model that has no end token of its own, or isn't to use it: no token at all may follow."""
    engine = make_engines(**PAGES, run_ahead=run_ahead)
    wishes = [
        held_to(sampling, regex=regex) for sampling in ({}, {"min_tokens": 50}, {"ignore_eos": True}, {"seed": 1})
    ]
    for output in complete(engine, [prompt(i) for i in range(4)], wishes):
        assert output.finish_reason is FinishReason.STOP, output.error
        assert re.fullmatch(regex, output.text)
        assert engine.tokenizer.decode(output.token_ids, skip_special_tokens=False) == output.text


def test_where_parameters_alone_leave_nothing_the_answer_ends_with_the_reason(make_engines):
    engine = make_engines()
    [eos] = engine.spec.eos_token_ids or [1]
    sampling = SamplingParams(allowed_token_ids=(eos,), stop_token_ids=(eos,), min_tokens=3, max_tokens=5)
    [output] = complete(engine, [prompt(0)], sampling)
    assert output.finish_reason is FinishReason.ERROR and "no token could be sampled" in output.error


def test_what_can_not_be_compiled_is_refused_where_it_is_submitted(make_engines):
    engine = make_engines()
    with pytest.raises(RequestError, match="uniqueItems") as error:
        complete(engine, [prompt(0)], held_to(json={"type": "array", "uniqueItems": True}))
    assert error.value.param == "structured_outputs.json"
    assert not engine.stats().num_waiting


def test_seeds_mean_the_same_with_and_without_run_ahead(make_engines):
    sampling = held_to({"seed": 11, "max_tokens": 40}, json={"type": "object"})
    one, other = (complete(make_engines(**PAGES, run_ahead=ahead), [prompt(2)], sampling)[0] for ahead in (True, False))
    assert one.token_ids == other.token_ids


def test_an_engine_forgets_the_grammars_of_answers_that_have_ended(make_engines: object) -> None:
    engine: Engine = make_engines()
    stream = engine.submit(Request(request_id="a", prompt_token_ids=prompt(1), sampling=held_to(json_object=True)))
    stream.abort()
    list(stream)
    complete(engine, [prompt(1)], held_to(regex="a"))
    assert engine._core.constraints._of == {}
