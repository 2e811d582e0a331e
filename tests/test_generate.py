from __future__ import annotations

import asyncio
import gc
import re
import threading
import weakref

import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb import generate as module
from jaxcb.config import EngineConfig
from jaxcb.errors import ConfigError, EngineStoppedError, RequestError
from jaxcb.generate import generate, generate_async, stream, stream_async
from jaxcb.request import FinishReason, SamplingParams
from jaxcb.structured_outputs import StructuredOutputs
from tests.engine.conftest import backend, make_engine, make_engines, params, tokenizer  # noqa: F401  # fixtures

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def engine(make_engines):  # noqa: F811  # the fixture
    """One for the module."""
    return make_engines()


@pytest.fixture
def own_engine(make_engine):  # noqa: F811  # the fixture
    """For a test that counts what it has done, or breaks it."""
    return make_engine()


def test_results_come_in_the_order_of_the_prompts(engine):
    prompts = [[i, i + 1] for i in range(40)]
    each = [SamplingParams(temperature=0, max_tokens=1 + i % 7, ignore_eos=True) for i in range(40)]
    outputs = generate(prompts, each, engine=engine, progress=False)
    assert [list(output.prompt_token_ids) for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == [1 + i % 7 for i in range(40)]


def test_more_prompts_than_are_handed_over_at_once(engine, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_AT_ONCE", 5)
    outputs = generate([[i] for i in range(23)], GREEDY, engine=engine, progress=False)
    assert [output.prompt_token_ids for output in outputs] == [[i] for i in range(23)]


def test_a_short_queue_is_waited_for(make_engine):  # noqa: F811  # the fixture
    engine = make_engine(max_num_seqs=2, max_waiting=2)
    prompts = [[i] for i in range(12)]
    outputs = generate(prompts, GREEDY, engine=engine, progress=False)
    again = asyncio.run(generate_async(prompts, GREEDY, engine=engine, progress=False))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in again]
    assert {output.finish_reason for output in outputs} == {FinishReason.LENGTH}
    assert len(engine.embed(prompts)) == len(asyncio.run(engine.embed_async(prompts))) == 12
    many = SamplingParams(n=3, max_tokens=2)
    with pytest.raises(RequestError, match="3 answers"):
        generate([[5]], many, engine=engine, progress=False)


def test_one_prompt_of_each_kind(engine):
    text = generate("the end", GREEDY, engine=engine, progress=False)
    ids = generate(engine.tokenizer.encode("the end"), GREEDY, engine=engine, progress=False)
    assert len(text) == len(ids) == 1 and text[0].token_ids == ids[0].token_ids
    both = generate(["the end", engine.tokenizer.encode("the end")], GREEDY, engine=engine, progress=False)
    assert both[0].token_ids == both[1].token_ids == text[0].token_ids


def test_stream_pieces_concatenate_to_what_generate_returns(engine):
    whole = generate("the end", GREEDY, engine=engine, progress=False)[0]
    pieces = list(stream("the end", GREEDY, engine=engine, progress=False))
    assert "".join(piece.new_text for piece in pieces) == whole.text == pieces[-1].text


def test_leaving_a_stream_early_drops_the_request(own_engine):
    for _ in stream("the end", SamplingParams(max_tokens=500, ignore_eos=True), engine=own_engine, progress=False):
        break
    generate("the end", GREEDY, engine=own_engine, progress=False)
    assert own_engine.stats().finished["abort"] == 1


def test_both_work_where_an_asyncio_loop_runs(engine):
    """As in a notebook cell."""

    async def cell():
        whole = generate("the end", GREEDY, engine=engine, progress=False)[0]
        return whole.text, [piece.text for piece in stream("the end", GREEDY, engine=engine, progress=False)][-1]

    text, streamed = asyncio.run(cell())
    assert text == streamed == generate("the end", GREEDY, engine=engine, progress=False)[0].text


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["ok", ""], r"prompts\[1\]: the prompt has no tokens"),
        ([[5], [999]], r"prompts\[1\]: prompt holds token id 999"),
        ([[5], []], r"prompts\[1\]: the prompt has no tokens"),
        (["ok", [1] * 701], r"prompts\[1\]: the prompt has 701 tokens"),
        (["ok", 3.5], r"prompts\[1\] must be a string"),
        (["ok", [{"role": "user", "content": "hi"}]], "no chat template"),
    ],
)
def test_a_bad_prompt_has_an_error_in_its_place_and_the_others_their_answers(engine, prompts, message):
    good, bad, again = generate([*prompts, prompts[0]], GREEDY, engine=engine, progress=False)
    assert bad.finish_reason is FinishReason.ERROR and re.search(message, bad.error) and bad.text == ""
    assert good.token_ids == again.token_ids and len(good.token_ids) == 6 and good.error is None


def test_one_that_fails_on_the_way_does_not_lose_the_others(engine):
    impossible = SamplingParams(allowed_token_ids=(5,), structured_outputs=StructuredOutputs(regex="zz"))
    good, bad = generate(["the end"] * 2, [GREEDY, impossible], engine=engine, progress=False)
    assert len(good.token_ids) == 6
    assert bad.finish_reason is FinishReason.ERROR and "no token could be sampled" in bad.error


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1] * 701], r"prompts\[0\]: the prompt has 701 tokens"),
        (["", [999]], r"prompts\[0\]: the prompt has no tokens"),
        (7, "prompts must be a prompt or a list"),
        ([[{"role": "user", "content": "hi"}]], "no chat template"),
    ],
)
def test_where_no_prompt_is_possible_the_first_one_s_error_is_raised(engine, prompts, message):
    """vllm#7283: a prompt without tokens stopped the engine."""
    steps = engine.stats().steps
    with pytest.raises(RequestError, match=message):
        generate(prompts, GREEDY, engine=engine, progress=False)
    assert engine.stats().steps == steps
    assert generate([], GREEDY, engine=engine, progress=False) == []


def test_sampling_must_match_the_prompts(engine):
    with pytest.raises(RequestError, match="2 prompts and 1 sampling"):
        generate(["a", "b"], [GREEDY], engine=engine, progress=False)
    with pytest.raises(ConfigError, match="either config or engine"):
        generate("a", config=EngineConfig(), engine=engine)


def test_without_parameters_the_model_s_defaults_hold(engine, monkeypatch):
    monkeypatch.setattr(engine, "sampling_defaults", {"temperature": 0.0, "max_tokens": 3})
    [output] = generate([5, 6], engine=engine, progress=False)
    [greedy] = generate([5, 6], SamplingParams(temperature=0.0, max_tokens=3), engine=engine, progress=False)
    assert output.token_ids == greedy.token_ids
    [own] = generate([5, 6], SamplingParams(seed=1), engine=engine, progress=False)
    assert len(own.token_ids) == 16 or own.finish_reason is FinishReason.STOP, "one that is given holds as it is"


def test_a_failing_engine_raises(own_engine, monkeypatch):
    monkeypatch.setattr(own_engine._runner, "launch", lambda plan: (_ for _ in ()).throw(RuntimeError("device lost")))
    with pytest.raises(EngineStoppedError, match="device lost"):
        generate(["a", "b"], GREEDY, engine=own_engine, progress=False)
    with pytest.raises(EngineStoppedError, match="device lost"):
        asyncio.run(generate_async(["a", "b"], GREEDY, engine=own_engine, progress=False))


def test_an_interrupt_returns_what_is_finished_and_drops_the_rest(own_engine, monkeypatch):
    """It comes when the first answer is in the bar; others are under way, and one has not begun."""

    def interrupted(self, output):
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_OPEN_AT_ONCE", 3)
    monkeypatch.setattr(module._Bar, "finished", interrupted)
    long = SamplingParams(temperature=0, max_tokens=600, ignore_eos=True)
    outputs = generate([[5], [6], [7], [8]], [GREEDY, long, long, long], engine=own_engine, progress=False)
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH, *[FinishReason.ABORT] * 3]
    assert len(outputs[0].token_ids) == 6 and len(outputs[3].token_ids) == 0
    monkeypatch.undo()
    assert generate("a", GREEDY, engine=own_engine, progress=False)[0].finish_reason is FinishReason.LENGTH
    assert own_engine.stats().finished["abort"] == 2


def test_a_slow_answer_does_not_keep_later_prompts_waiting(engine, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_AT_ONCE", 2)
    started = []
    monkeypatch.setattr(module, "_request", _noting(module._request, started, engine))
    long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
    outputs = generate([[5], *[[6]] * 8], [long, *[GREEDY] * 8], engine=engine, progress=False)
    assert len(outputs[0].token_ids) == 300 and max(started) == 2
    assert outputs[0].finished_s > outputs[7].finished_s, "the short ones went through beside the long one"


def _noting(make, counts, engine):
    """Notes how many requests there are in the engine with each that is made."""

    def noted(*args):
        counts.append(len(engine._inbox.open_keys()) + 1)
        return make(*args)

    return noted


def test_coroutines_get_the_same(engine):
    async def both():
        whole = await generate_async(["the end", "", [5, 6]], GREEDY, engine=engine)
        return whole, [piece async for piece in stream_async("the end", GREEDY, engine=engine)]

    whole, pieces = asyncio.run(both())
    expected = generate(["the end", [5, 6]], GREEDY, engine=engine, progress=False)
    assert [whole[0].text, whole[2].text] == [output.text for output in expected]
    assert whole[1].finish_reason is FinishReason.ERROR
    assert "".join(piece.new_text for piece in pieces) == whole[0].text


def test_a_coroutine_needs_no_engine_of_its_own(engine, monkeypatch):
    """Two at once, and calls that block, share the one that the first of them starts."""
    started = []

    def start(config, *, progress):
        started.append(config)
        engine.asked_for = config
        return engine

    monkeypatch.setattr(module.cluster, "start", start)
    monkeypatch.setattr(module, "_shared", None)
    config = EngineConfig(max_num_seqs=4)

    async def both():
        calls = (generate_async("the end", GREEDY, config=config, progress=False) for _ in range(2))
        pieces = [piece async for piece in stream_async("the end", GREEDY, config=config, progress=False)]
        return [output.text for [output] in await asyncio.gather(*calls)] + [pieces[-1].text]

    texts = asyncio.run(both())
    assert texts == [generate("the end", GREEDY, config=config, progress=False)[0].text] * 3
    assert len(started) == 1
    with pytest.raises(ConfigError, match="either config or engine"):
        asyncio.run(generate_async("a", config=config, engine=engine))


def test_coroutines_have_a_window_too(engine, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_AT_ONCE", 3)
    open_then = []
    monkeypatch.setattr(module, "_ready_request", _noting(module._ready_request, open_then, engine))
    outputs = asyncio.run(generate_async([[i] for i in range(20)], GREEDY, engine=engine, progress=False))
    assert [output.prompt_token_ids for output in outputs] == [[i] for i in range(20)]
    assert max(open_then) <= 3


def test_a_grammar_is_compiled_beside_the_loop(engine, monkeypatch):
    threads = []
    compile_grammar = engine.compile_grammar
    monkeypatch.setattr(
        engine, "compile_grammar", lambda wanted: threads.append(threading.current_thread()) or compile_grammar(wanted)
    )
    held = SamplingParams(structured_outputs=StructuredOutputs(regex="ab"))
    [output] = asyncio.run(generate_async("the end", held, engine=engine, progress=False))
    assert output.text == "ab"
    assert threads and threading.main_thread() not in threads


def test_the_bar_shows_tokens_a_second(engine, capsys):
    generate(["a", "b"], GREEDY, engine=engine)
    assert "tok/s" in capsys.readouterr().err


def test_another_config_frees_the_engine_before(monkeypatch, make_engine):  # noqa: F811  # the fixture
    made = []

    def start(config, *, progress):
        made.append(weakref.ref(engine := make_engine()))
        make_engine.forget()
        engine.asked_for = config
        return engine

    monkeypatch.setattr(module.cluster, "start", start)
    for seqs in (1, 1, 2):
        generate([5], GREEDY, config=EngineConfig(max_num_seqs=seqs), progress=False)
    assert len(made) == 2, "an equal config reuses the engine"
    gc.collect()
    assert made[0]() is None and made[1]() is not None
    module._shut_down_shared()


def test_arrays_are_prompts(engine):
    ids = engine.tokenizer.encode("the end")
    expected = generate(ids, GREEDY, engine=engine, progress=False)[0].token_ids
    for prompts in (np.array(ids), jnp.array(ids), np.array([ids, ids]), [np.array(ids, np.uint16)], [tuple(ids)]):
        outputs = generate(prompts, GREEDY, engine=engine, progress=False)
        assert [output.token_ids for output in outputs] == [expected] * len(outputs)
        assert len(outputs) == (2 if getattr(prompts, "ndim", 1) == 2 else 1)


@pytest.mark.parametrize(
    "prompts",
    [b"bytes", 5, {"role": "user"}, [b"bytes"], [[1.5]], [None], np.zeros((1, 1, 1), int), np.zeros(3), [{}, 1]],
)
def test_prompts_of_the_wrong_type_are_refused_by_name(engine, prompts):
    with pytest.raises(RequestError, match="prompt"):
        generate(prompts, GREEDY, engine=engine, progress=False)


@pytest.mark.parametrize("sampling", [{}, [{}], {"temperature": 0}, "greedy", 0])
def test_sampling_of_the_wrong_type_is_refused(engine, sampling):
    with pytest.raises(RequestError, match="sampling must be"):
        generate([1], sampling, engine=engine, progress=False)
    with pytest.raises(RequestError, match="sampling must be"):
        next(stream([1], sampling, engine=engine, progress=False))


@pytest.mark.parametrize("config", [{}, "model"])
def test_a_config_of_the_wrong_type_is_refused(config):
    with pytest.raises(ConfigError, match="config must be an EngineConfig"):
        generate([1], GREEDY, config=config, progress=False)
