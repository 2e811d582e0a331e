from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
import time
from collections.abc import Sequence
from itertools import accumulate

import jax
import pytest

from jaxcb.engine import Engine
from jaxcb.errors import ConfigError, EngineStoppedError, QueueFullError, RequestError
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.text.detokenizer import Detokenizer
from tests.engine.run import complete

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def request(name: str, sampling: SamplingParams = LONG, prompt: tuple[int, ...] = (5, 6, 7)) -> Request:
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)


def is_idle(engine: Engine) -> bool:
    stats = engine.stats()
    return (stats.num_running, stats.num_waiting, stats.kv_pages_used) == (0, 0, 0)


@pytest.fixture
def engine(make_engine) -> Engine:
    return make_engine()


def test_an_abort_ends_the_stream_and_frees_everything(engine):
    stream = engine.submit(request("a"))
    next(stream)
    stream.abort()
    last = list(stream)[-1]
    assert last.finish_reason is FinishReason.ABORT
    assert 0 < len(last.token_ids) < 400
    wait_until(lambda: is_idle(engine))
    assert engine.stats().finished["abort"] == 1


def test_a_request_can_be_aborted_before_it_ever_ran_and_while_it_waits(engine):
    running = [engine.submit(request(f"r{i}")) for i in range(4)]
    waiting = engine.submit(request("w"))
    waiting.abort()
    assert list(waiting)[-1].token_ids == []
    for stream in running:
        stream.abort()
        assert list(stream)[-1].finish_reason is FinishReason.ABORT
    at_once = engine.submit(request("now"))
    at_once.abort()
    assert list(at_once)[-1].finish_reason is FinishReason.ABORT
    wait_until(lambda: is_idle(engine))


def test_an_abort_does_not_disturb_the_neighbours(engine):
    alone = complete(engine, [(9, 9, 9)], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))[0]
    other = engine.submit(request("other"))
    stream = engine.submit(
        request("mine", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), prompt=(9, 9, 9))
    )
    next(stream)
    other.abort()
    assert list(stream)[-1].token_ids == alone.token_ids


def test_stream_pieces_concatenate_to_the_whole(engine):
    outputs = list(engine.submit(request("a", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))))
    last = outputs[-1]
    assert "".join(output.new_text for output in outputs) == last.text
    assert [token for output in outputs for token in output.new_token_ids] == last.token_ids
    assert last.finish_reason is FinishReason.LENGTH and len(last.token_ids) == 30
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert last.first_token_s is not None and last.finished_s is not None
    assert last.first_token_s <= last.finished_s


def completed(engine: Engine, token_ids: Sequence[int], stop: str, at: int) -> int:
    """Tokens after which the text holds ``stop`` at ``at`` in full."""
    detokenizer = Detokenizer(engine.tokenizer, [], skip_special_tokens=True)
    lengths = accumulate(len(detokenizer.add([token])) for token in token_ids)
    return next(count for count, length in enumerate(lengths, start=1) if length >= at + len(stop))


def test_a_stop_string_ends_the_text_before_it_and_frees_the_pages(engine):
    """text-generation-inference#1039, omlx#2386: a stop string was only found where a token ended with it. Of the
    tokens, the one that completes it is the last that counts."""
    whole = complete(engine, [(5, 6, 7)], LONG)[0].text
    stop = whole[10:14]
    at = whole.index(stop)
    for include, text in ((False, whole[:at]), (True, whole[: at + len(stop)])):
        sampling = SamplingParams(
            temperature=0, max_tokens=400, ignore_eos=True, stop=stop, include_stop_str_in_output=include
        )
        outputs = list(engine.submit(request("a", sampling)))
        assert outputs[-1].text == text == "".join(output.new_text for output in outputs)
        assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, stop)
        assert len(outputs[-1].token_ids) == completed(engine, outputs[-1].token_ids, stop, at)
        wait_until(lambda: is_idle(engine))


def test_a_stop_string_is_passed_by_before_min_tokens(engine):
    whole = complete(engine, [(5, 6, 7)], LONG)[0]
    stop = whole.text[3:5]
    sampling = SamplingParams(temperature=0, max_tokens=400, min_tokens=30, ignore_eos=True, stop=stop)
    output = complete(engine, [(5, 6, 7)], sampling)[0]
    assert len(output.token_ids) >= 30
    assert whole.text.startswith(output.text) and stop in output.text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_that_came_too_early_stays_and_the_next_one_ends_the_text(engine, include):
    """vllm#21987, TensorRT-LLM#4776: a stop string ended the answer before ``min_tokens`` were there."""
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    [whole] = complete(engine, [(5, 6, 7)], greedy)
    text, count = whole.text, functools.partial(completed, engine, whole.token_ids)
    for stop in sorted(set(text)):
        places = [i for i, char in enumerate(text) if char == stop]
        late = [place for place in places if count(stop, place) >= 20]
        if count(stop, places[0]) < 10 and (not late or count(stop, late[0]) > 20):
            break
    else:
        pytest.fail("no character of the text does for this test")
    held = dataclasses.replace(greedy, min_tokens=20, stop=stop, include_stop_str_in_output=include)
    outputs = list(engine.submit(request("a", held)))
    last = outputs[-1]
    assert last.text == "".join(output.new_text for output in outputs)
    assert last.text == (text[: late[0] + include] if late else text)
    assert len(last.token_ids) == (count(stop, late[0]) if late else 60)
    assert last.finish_reason is (FinishReason.STOP if late else FinishReason.LENGTH)


def test_a_stop_token_that_is_forced_comes_as_soon_as_it_may(engine):
    """vllm#21987, with the end token in place of a string."""
    for min_tokens in (0, 1, 5):
        sampling = SamplingParams(
            temperature=0, max_tokens=30, min_tokens=min_tokens, stop_token_ids=(77,), logit_bias={77: 100}
        )
        [output] = complete(engine, [(5, 6, 7)], sampling)
        assert len(output.token_ids) == min_tokens + 1 and output.token_ids[-1] == output.stop_reason == 77


def test_a_stop_token_ends_the_sequence_and_has_no_text(engine):
    whole = complete(engine, [(5, 6, 7)], LONG)[0]
    stop = whole.token_ids[7]
    first = whole.token_ids.index(stop)
    output = complete(
        engine, [(5, 6, 7)], SamplingParams(temperature=0, max_tokens=99, ignore_eos=True, stop_token_ids=(stop,))
    )[0]
    assert output.token_ids == whole.token_ids[: first + 1]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, stop)
    assert whole.text.startswith(output.text) and len(output.text) < len(whole.text)


def test_min_tokens_holds_a_stop_token_back(engine):
    free = list(complete(engine, [(5, 6, 7)], LONG)[0].token_ids)
    stop = next(token for token in free[3:] if token not in free[:3])
    first = free.index(stop)
    sampling = SamplingParams(
        temperature=0, max_tokens=first + 20, min_tokens=first + 10, ignore_eos=True, stop_token_ids=(stop,)
    )
    held = list(complete(engine, [(5, 6, 7)], sampling)[0].token_ids)
    assert held[:first] == free[:first] and stop not in held[: first + 10]
    assert len(held) > first + 9


def test_an_id_may_be_used_again_as_soon_as_its_stream_has_ended(engine):
    stop = complete(engine, [(5, 6, 7)], LONG)[0].text[2:4]
    for _ in range(20):
        stopped = complete(engine, [(5, 6, 7)], SamplingParams(temperature=0, max_tokens=99, stop=stop))[0]
        assert stopped.stop_reason == stop
        again = complete(engine, [(8, 8)], SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0]
        assert again.finish_reason is FinishReason.LENGTH
    wait_until(lambda: is_idle(engine))


def test_seeds_reproduce_and_their_absence_varies(engine):
    def tokens(seed: int | None) -> list[int]:
        sampling = SamplingParams(temperature=1.5, max_tokens=12, seed=seed, ignore_eos=True)
        return list(complete(engine, [(5, 6, 7)], sampling)[0].token_ids)

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert tokens(None) != tokens(None)


def test_nothing_compiles_once_the_engine_is_ready(engine):
    """tpu-inference#1967, #180, sglang-jax#234: the first request of some shape, or with some option, compiled for
    seconds. Everything else that the tests do with engines is under the compile guard (``tests/conftest.py``)."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: object) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        mixes = [
            SamplingParams(temperature=0, max_tokens=5),
            SamplingParams(temperature=0.7, max_tokens=20, seed=1),
            SamplingParams(top_k=5, top_p=0.5, max_tokens=9, min_tokens=4, stop="x"),
            SamplingParams(max_tokens=70, ignore_eos=True),
            SamplingParams(max_tokens=5, repetition_penalty=1.1, logit_bias={5: 1}, bad_words=("ab",), typical_p=0.9),
            SamplingParams(max_tokens=5, temperature=0, logprobs=20, prompt_logprobs=3),
            SamplingParams(max_tokens=3, logprobs=-1, prompt_logprobs=-1),
        ]
        prompts = [[i % 250 for i in range(length)] for length in (1, 2, 31, 33, 127, 128, 129, 257, 600)]
        for sampling in mixes:
            complete(engine, prompts, sampling)
        complete(engine, prompts * 2, [mixes[i % 7] for i in range(2 * len(prompts))])
        for stream in engine.submit_choices(request("n", SamplingParams(n=3, max_tokens=9))):
            list(stream)
        assert compiled == []
        jax.jit(lambda x: x * 3 + 1)(1.5).block_until_ready()
        assert compiled, "the listener hears nothing: this test can't fail"
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ((), LONG, "prompt"),
        ((264,), LONG, "prompt"),
        ((-1,), LONG, "prompt"),
        ((1.5,), LONG, "prompt"),
        ((1,) * 700, LONG, "prompt"),
        ((1,), SamplingParams(max_tokens=700), "max_tokens"),
        ((1,), SamplingParams(stop_token_ids=(264,)), "stop_token_ids"),
    ],
)
def test_an_impossible_request_is_refused_at_submit_and_leaves_no_trace(engine, prompt, sampling, param):
    with pytest.raises(RequestError) as error:
        engine.submit(request("a", sampling, prompt))
    assert error.value.param == param
    assert is_idle(engine)
    assert complete(engine, [(1,)], SamplingParams(max_tokens=1))[0].finished


def test_the_queue_has_a_limit_and_recovers(make_engine):
    engine = make_engine(max_waiting=3)
    streams, refused = [], 0
    for i in range(40):
        try:
            streams.append(engine.submit(request(str(i), SamplingParams(max_tokens=50, ignore_eos=True))))
        except QueueFullError as error:
            assert "the limit is 3" in str(error)
            refused += 1
    assert refused > 0 and len(streams) >= 3
    assert all(list(stream)[-1].finish_reason is FinishReason.LENGTH for stream in streams)
    assert complete(engine, [(1,)], SamplingParams(max_tokens=1))[0].finished


def test_without_a_limit_a_burst_is_answered_to_the_last_request(engine):
    """sglang#33858, text-generation-inference#439: of a burst some requests got no answer, or it killed the engine."""
    eight = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    [alone] = complete(engine, [(5, 6, 7)], eight)
    pairs = [request(f"two {i}", SamplingParams(n=2, seed=i, max_tokens=8, ignore_eos=True)) for i in range(20)]
    streams = [engine.submit(request(f"one {i}", eight)) for i in range(260)]
    twos = [engine.submit_choices(pair) for pair in pairs]
    assert all(list(stream)[-1].token_ids == alone.token_ids for stream in streams)
    assert all(len(list(stream)[-1].token_ids) == 8 for pair in twos for stream in pair)
    wait_until(lambda: is_idle(engine))


def test_every_request_is_counted_once_by_how_it_ended(engine):
    """vllm#29928, #22545, #31503: aborted requests were counted nowhere."""
    ends = {"stop": 0, "length": 0, "abort": 0, "error": 0}
    assert engine.stats().finished == ends
    few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    ending = dataclasses.replace(few, stop_token_ids=(77,), logit_bias={77: 100})
    streams = [engine.submit(request(str(i), (few, ending, LONG)[i % 3])) for i in range(30)]
    for stream in streams[2::3]:
        stream.abort()
    for name in ("0", "no prompt"):
        with pytest.raises(RequestError):
            engine.submit(request(name, prompt=() if name != "0" else (1.5,)))
    for stream in streams:
        list(stream)
    wait_until(lambda: is_idle(engine))
    assert engine.stats().finished == ends | {"stop": 10, "length": 10, "abort": 10}


def test_shutdown_drains_what_it_is_given_time_for_and_aborts_the_rest(make_engine):
    engine = make_engine()
    stream = engine.submit(request("a", SamplingParams(max_tokens=20, ignore_eos=True)))
    engine.shutdown(drain_s=60)
    assert list(stream)[-1].finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineStoppedError, match="shutting down"):
        engine.submit(request("b"))

    engine = make_engine()
    streams = [engine.submit(request(str(i))) for i in range(20)]
    engine.shutdown()
    assert {list(stream)[-1].finish_reason for stream in streams} == {FinishReason.ABORT}


def test_a_failing_step_ends_every_stream_with_the_reason(make_engine, monkeypatch):
    engine = make_engine()
    monkeypatch.setattr(engine._runner, "launch", lambda plan: (_ for _ in ()).throw(RuntimeError("device lost")))
    streams = [engine.submit(request(str(i))) for i in range(3)]
    for stream in streams:
        last = list(stream)[-1]
        assert last.finish_reason is FinishReason.ERROR and "device lost" in (last.error or "")
    assert not engine.healthy
    with pytest.raises(EngineStoppedError, match="device lost"):
        engine.submit(request("b"))


def test_a_stream_made_in_a_loop_is_awaited(engine):
    async def run() -> list[list[int]]:
        async def one(name: str) -> list[int]:
            sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
            outputs = [output async for output in engine.submit(request(name, sampling))]
            assert "".join(output.new_text for output in outputs) == outputs[-1].text
            return list(outputs[-1].token_ids)

        return await asyncio.gather(*(one(str(i)) for i in range(8)))

    answers = asyncio.run(run())
    alone = complete(engine, [(5, 6, 7)], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))[0]
    assert answers == [alone.token_ids] * 8


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_model_len": 2000}, "max_model_len"),
        ({"max_model_len": 700, "num_kv_pages": 43}, "max_model_len"),
        ({"num_kv_pages": None, "kv_cache_memory_bytes": 100}, "kv_cache_memory_bytes"),
        ({"max_num_seqs": 200}, "max_num_batched_tokens"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(make_engine, changes, param):
    with pytest.raises(ConfigError) as error:
        make_engine(**changes)
    assert error.value.param == param


def test_a_caller_may_change_its_prompt_after_submitting(engine):
    prompt = [5, 6, 7]
    stream = engine.submit(Request(request_id="a", prompt_token_ids=prompt, sampling=LONG))
    prompt.clear()
    assert list(stream)[-1].prompt_token_ids == [5, 6, 7]
    assert engine.healthy


def test_after_a_shutdown_in_the_middle_of_work_the_gauges_are_at_zero(make_engine):
    engine = make_engine()
    streams = [engine.submit(request(f"r{i}")) for i in range(16)]
    next(streams[0])
    assert engine.stats().kv_pages_used > 0
    engine.shutdown()
    assert [list(stream)[-1].finish_reason for stream in streams] == [FinishReason.ABORT] * 16
    assert is_idle(engine) and engine.stats().finished["abort"] == 16


def test_a_request_that_the_scheduler_refuses_late_ends_with_its_reason_and_harms_nobody(engine, monkeypatch):
    def refuse(requests, grammar):
        raise RequestError("no more room")

    monkeypatch.setattr(engine._core, "add_choices", refuse)
    [output] = list(engine.submit(request("late")))
    assert (output.finish_reason, output.error) == (FinishReason.ERROR, "no more room")
    monkeypatch.undo()
    assert engine.healthy
    assert complete(engine, [(5,)], SamplingParams(max_tokens=3))[0].finish_reason is not FinishReason.ERROR


def test_a_policy_that_fails_for_a_request_harms_no_other(make_engine):
    def key(sequence, view):
        return {"": 1}[sequence.request.tenant]

    engine = make_engine(policy=key)
    running = engine.submit(request("a"))
    next(running)
    odd = Request(request_id="b", prompt_token_ids=[5], sampling=SamplingParams(max_tokens=3), tenant="odd")
    several = dataclasses.replace(odd, request_id="c", sampling=SamplingParams(max_tokens=3, n=2))
    for stream in (engine.submit(odd), *engine.submit_choices(several)):
        [output] = list(stream)
        assert output.finish_reason is FinishReason.ERROR
        assert output.error == "the policy function raised KeyError for this request: 'odd'"
    before = engine.stats().generation_tokens
    for stream in engine.fork([running], [(request("d"), 0), (dataclasses.replace(odd, request_id="e"), 0)]):
        assert list(stream)[-1].finish_reason is FinishReason.ERROR
    wait_until(lambda: is_idle(engine))
    assert engine.stats().generation_tokens < before + 300, "the fork that was taken in ends with the other"
    assert engine.healthy and complete(engine, [(5,)], SamplingParams(max_tokens=3))[0].finished


def test_compiling_stops_at_the_first_failure(make_engine, monkeypatch):
    """As at Ctrl-C: what is being compiled ends, what waits for a thread never starts."""
    begun = []

    def compile_one(job, store):
        begun.append(job.name)
        time.sleep(0.05)
        raise MemoryError

    monkeypatch.setattr("jaxcb.step.jobs._program", compile_one)
    with pytest.raises(MemoryError):
        make_engine(decode_buckets=tuple(range(1, 8)), mixed_buckets=tuple(range(16, 128, 4)))
    assert len(begun) < 20, "38 programs wait"


def test_a_paused_engine_makes_no_steps_and_goes_on_where_it_was(engine):
    [expected] = complete(engine, [[5, 6, 7]], LONG)
    stream = engine.submit(request("a"))
    first = next(stream)
    engine.pause()
    time.sleep(0.1)  # for the step under way
    steps = engine.stats().steps
    waiting = engine.submit(request("b"))
    time.sleep(0.1)
    assert engine.paused and engine.stats().steps == steps and engine.stats().stalled_s == 0
    engine.resume()
    assert not engine.paused
    assert (
        list(stream)[-1].token_ids == expected.token_ids
        and first.token_ids == expected.token_ids[: len(first.token_ids)]
    )
    assert list(waiting)[-1].token_ids == expected.token_ids


def test_an_abort_and_a_shutdown_need_no_resume(engine):
    stream = engine.submit(request("a"))
    next(stream)
    engine.pause()
    stream.abort()
    assert list(stream)[-1].finish_reason is FinishReason.ABORT
    last = engine.submit(request("b", SamplingParams(temperature=0, max_tokens=3)))
    engine.shutdown(drain_s=20)
    assert list(last)[-1].finish_reason in (FinishReason.LENGTH, FinishReason.STOP)


def test_a_step_that_does_not_come_back_is_seen(engine, monkeypatch):
    assert engine.stats().stalled_s == 0
    hang = threading.Event()
    step = engine._core.step
    monkeypatch.setattr(engine._core, "step", lambda: (hang.wait(20), step())[1])
    stream = engine.submit(request("a", SamplingParams(temperature=0, max_tokens=3)))
    wait_until(lambda: engine.stats().stalled_s > 0.05)
    hang.set()
    list(stream)
    wait_until(lambda: is_idle(engine))
    assert engine.stats().stalled_s == 0


def test_a_reset_forgets_every_prefix(engine):
    prompt = list(range(5, 69))
    few = SamplingParams(temperature=0, max_tokens=3)
    assert complete(engine, [prompt], few)[0].num_cached_tokens == 0
    assert complete(engine, [prompt], few)[0].num_cached_tokens > 0
    engine.reset_prefix_cache()
    assert complete(engine, [prompt], few)[0].num_cached_tokens == 0
