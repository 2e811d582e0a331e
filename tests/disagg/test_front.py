"""Prompts on one engine, answers on another: the same tokens as on one engine, and nothing stays behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.disagg import Disaggregated, LocalLink, PromptService
from jaxcb.disagg.start import start_pairs, start_role
from jaxcb.engine import Engine
from jaxcb.errors import ConfigError, EngineStoppedError, RequestError
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler.replay import replay
from jaxcb.structured_outputs import StructuredOutputs
from tests.disagg.run import PROMPTS, SAMPLING, answers, assert_nothing_is_held, keep_roles, tokens_of, wait_for
from tests.engine.conftest import backend, make_engines, params, tokenizer  # noqa: F401  # fixtures

LONG = [[(7 * i * j + 3 * j) % 250 for j in range(500)] for i in range(1, 5)]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(autouse=True)
def roles_are_kept(request, monkeypatch) -> None:
    """But where their change is tested."""
    if "idle" not in request.node.name:
        keep_roles(monkeypatch)


@pytest.fixture(scope="module")
def plain(make_engines) -> Engine:  # noqa: F811  # the fixture
    return make_engines()


@pytest.fixture(scope="module")
def prefill(make_engines) -> Engine:  # noqa: F811  # the fixture
    return make_engines(kv_transfer=True)


@pytest.fixture(scope="module")
def decode(make_engines) -> Engine:  # noqa: F811  # the fixture
    return make_engines(kv_transfer=True, num_kv_pages=300)


@pytest.fixture
def front(prefill, decode) -> Iterator[Disaggregated]:
    """Over engines that outlive it."""
    for engine in (prefill, decode):
        engine.reset_prefix_cache()
    made = front_of(prefill, decode)
    yield made
    unlink(made)
    assert_nothing_is_held(prefill, decode)


def front_of(prefill: Engine, decode: Engine) -> Disaggregated:
    return Disaggregated(decode, [LocalLink(PromptService(prefill), decode)], [prefill])


def unlink(front: Disaggregated) -> None:
    front._stopping.set()
    front._watcher.join()
    for link in front.links:
        link.close()


def handed_over(front: Disaggregated) -> int:
    return front.decode.handovers.incoming.totals.requests


def test_the_answers_are_those_of_one_engine(front, plain):
    expected = tokens_of(answers(plain, PROMPTS, SAMPLING))
    totals = handed_over(front)
    assert tokens_of(answers(front, PROMPTS, SAMPLING)) == expected
    assert handed_over(front) - totals == len(PROMPTS)
    assert tokens_of(answers(front, PROMPTS, SAMPLING)) == expected, "now with every prefix in both caches"


def test_a_prompt_travels_chunk_by_chunk_and_the_decode_engine_computes_none_of_it(front, prefill, decode, plain):
    pages, steps = decode.handovers.incoming.totals.pages, decode.stats().steps
    [[output]] = answers(front, LONG[:1], [GREEDY])
    assert decode.handovers.incoming.totals.pages - pages == 32, "500 tokens in pages of 16, the last one in part"
    assert decode.stats().steps - steps <= 10, "one for each token but the first, and one that came too late"
    assert [[list(output.token_ids)]] == tokens_of(answers(plain, LONG[:1], [GREEDY]))


def test_pages_of_a_beginning_that_is_known_do_not_travel(front, decode):
    answers(front, LONG[:1], [GREEDY])
    pages = decode.handovers.incoming.totals.pages
    longer = LONG[0][:480] + [7] * 100
    [[output]] = answers(front, [longer], [GREEDY])
    assert decode.handovers.incoming.totals.pages - pages == 37 - 30
    assert output.num_cached_tokens == 480


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=8, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0, frequency_penalty=0.7, presence_penalty=0.4, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=3, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0, structured_outputs=StructuredOutputs(regex="[ab]{3}c+d")),
        SamplingParams(max_tokens=6, temperature=0, prompt_logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=1, temperature=0),
        SamplingParams(max_tokens=20, min_tokens=7, temperature=1.5, seed=11, stop_token_ids=[*range(100, 108)]),
        SamplingParams(max_tokens=40, temperature=1.2, seed=2, ignore_eos=True, no_repeat_ngram_size=2),
        SamplingParams(n=2, best_of=3, temperature=0.9, seed=8, max_tokens=5, ignore_eos=True),
    ],
    ids=["n", "penalties", "logprobs", "grammar", "prompt-logprobs", "one-token", "min-tokens", "ngram", "best-of"],
)
def test_every_parameter_means_what_it_does_on_one_engine(front, plain, sampling):
    prompts = [LONG[1][:150], PROMPTS[3]]
    expected = answers(plain, prompts, [sampling] * 2)
    given = answers(front, prompts, [sampling] * 2)
    assert tokens_of(given) == tokens_of(expected)
    for one, other in zip(chain(*given), chain(*expected), strict=True):
        assert (one.text, one.finish_reason, one.stop_reason) == (other.text, other.finish_reason, other.stop_reason)
        if sampling.logprobs is not None:
            np.testing.assert_allclose(one.logprobs.logprobs, other.logprobs.logprobs, atol=1e-4)
            np.testing.assert_array_equal(one.logprobs.top_ids, other.logprobs.top_ids)
        if sampling.prompt_logprobs is not None:
            assert len(one.prompt_logprobs) == len(one.prompt_token_ids) - 1


def test_a_stop_string_in_the_first_token_ends_the_request_before_it_is_adopted(front, plain):
    [[first]] = answers(plain, [PROMPTS[4]], [GREEDY])
    sampling = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, stop=[first.text[0]])
    [[output]], [[expected]] = answers(front, [PROMPTS[4]], [sampling]), answers(plain, [PROMPTS[4]], [sampling])
    assert (output.text, output.stop_reason) == (expected.text, expected.stop_reason)


def test_embeddings_are_computed_where_the_answer_is(front, plain):
    texts = [PROMPTS[2], PROMPTS[5]]
    np.testing.assert_allclose(front.embed(texts), plain.embed(texts), atol=1e-5)


def test_a_decode_pool_with_room_for_two_takes_many_in_turn(prefill, make_engines, plain):  # noqa: F811
    small = make_engines(kv_transfer=True, num_kv_pages=70, max_model_len=700)
    front = front_of(prefill, small)
    prompts = [*LONG, *PROMPTS, *LONG]
    sampling = [GREEDY] * len(prompts)
    assert tokens_of(answers(front, prompts, sampling)) == tokens_of(answers(plain, prompts, sampling))
    unlink(front)
    assert_nothing_is_held(prefill, small)


def test_what_waits_for_room_is_asked_for_when_the_last_step_has_given_its_pages_back(prefill, make_engines, plain):  # noqa: F811
    """By then the prompts are done, and nothing comes that would wake the decode engine."""
    for_one = make_engines(kv_transfer=True, num_kv_pages=44, max_model_len=700, seed=5)
    front = front_of(prefill, for_one)
    sampling = [SamplingParams(max_tokens=80, temperature=0, ignore_eos=True)] * 3
    assert tokens_of(answers(front, LONG[:3], sampling)) == tokens_of(answers(plain, LONG[:3], sampling))
    unlink(front)


def test_a_prefill_pool_that_waits_for_its_pages_to_be_taken_goes_on_afterwards(decode, make_engines, plain):  # noqa: F811
    small = make_engines(kv_transfer=True, num_kv_pages=44, max_model_len=700)
    front = front_of(small, decode)
    decode.pause()
    results: list[list[list[list[int]]]] = []
    thread = threading.Thread(target=lambda: results.append(tokens_of(answers(front, LONG, [GREEDY] * 4))))
    thread.start()
    time.sleep(0.3)
    decode.resume()
    thread.join()
    assert results == [tokens_of(answers(plain, LONG, [GREEDY] * 4))]
    unlink(front)
    assert_nothing_is_held(small, decode)


def test_clients_that_leave_at_any_moment_leave_nothing_behind(front, prefill, decode):
    for delay_s in (0.0, 0.002, 0.01, 0.03, 0.06):
        streams = [
            front.submit_blocking(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=GREEDY))
            for i, prompt in enumerate(LONG)
        ]
        time.sleep(delay_s)
        for stream in streams:
            stream.abort()
        reasons = {list(stream)[-1].finish_reason for stream in streams}
        assert reasons <= {FinishReason.ABORT, FinishReason.LENGTH}
        assert_nothing_is_held(prefill, decode)


def test_new_weights_while_kv_is_under_way_mix_nothing(front, params, prefill, decode):  # noqa: F811
    expected = tokens_of(answers(front, LONG, [GREEDY] * 4))
    for delay_s in (0.0, 0.01, 0.03):
        front.reset_prefix_cache()
        streams = [
            front.submit_blocking(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=GREEDY))
            for i, prompt in enumerate(LONG)
        ]
        time.sleep(delay_s)
        front.update_params(params)
        assert [[list(list(stream)[-1].token_ids)] for stream in streams] == expected
    assert_nothing_is_held(prefill, decode)


def test_sleep_and_wake_while_kv_is_under_way(front, prefill, decode, plain):
    streams = [
        front.submit_blocking(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=GREEDY))
        for i, prompt in enumerate(LONG)
    ]
    time.sleep(0.02)
    front.sleep()
    front.wake()
    expected = tokens_of(answers(plain, LONG, [GREEDY] * 4))
    assert [[list(list(stream)[-1].token_ids)] for stream in streams] == expected


@pytest.mark.parametrize("after", ["nothing", "a chunk", "the prompt"])
def test_a_prefill_engine_that_fails_costs_time_and_no_answer(decode, make_engines, plain, after):  # noqa: F811
    num_left = {"nothing": 0, "a chunk": 1, "the prompt": 3}[after]
    broken = make_engines(kv_transfer=True, seed=100 + num_left)
    front = front_of(broken, decode)
    gather = broken._runner.gather_pages
    calls = []

    def fails(pages):
        calls.append(pages)
        if len(calls) > num_left:
            raise RuntimeError("the device is gone")
        return gather(pages)

    broken._runner.gather_pages = fails
    decode.reset_prefix_cache()
    expected = tokens_of(answers(plain, LONG, [GREEDY] * 4))
    assert tokens_of(answers(front, LONG, [GREEDY] * 4)) == expected
    assert not broken.healthy and front.healthy
    assert tokens_of(answers(front, LONG, [GREEDY] * 4)) == expected, "the decode engine goes on alone"
    unlink(front)
    assert_nothing_is_held(decode)


def test_a_decode_engine_that_fails_ends_its_requests_and_frees_the_prefill_engine(prefill, make_engines):  # noqa: F811
    broken = make_engines(kv_transfer=True, seed=77)
    front = front_of(prefill, broken)
    broken._runner.scatter_pages = lambda pages, rows: 1 / 0
    outputs = answers(front, LONG, [GREEDY] * 4)
    assert {output.finish_reason for [output] in outputs} == {FinishReason.ERROR}
    assert not front.healthy
    assert_nothing_is_held(prefill)
    unlink(front)


def test_an_idle_decode_engine_takes_prompts_when_the_other_has_too_many(front, decode, prefill, plain):
    prefill.pause()
    taken = decode.handovers.incoming.totals.taken_over
    results: list[list[list[list[int]]]] = []
    thread = threading.Thread(target=lambda: results.append(tokens_of(answers(front, LONG, [GREEDY] * 4))))
    thread.start()
    deadline = time.monotonic() + 20
    while decode.handovers.incoming.totals.taken_over == taken and time.monotonic() < deadline:
        time.sleep(0.02)
    assert decode.handovers.incoming.totals.taken_over > taken
    prefill.resume()
    thread.join()
    assert results == [tokens_of(answers(plain, LONG, [GREEDY] * 4))]


def test_a_prefill_engine_that_hung_and_comes_back_keeps_no_pages_for_what_was_taken_over(
    prefill,
    make_engines,  # noqa: F811
    plain,
    monkeypatch,
):
    for_one = make_engines(kv_transfer=True, num_kv_pages=44, max_model_len=700, seed=5)
    front = front_of(prefill, for_one)
    prefill.pause()
    streams = [
        front.submit_blocking(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=GREEDY))
        for i, prompt in enumerate(LONG[:3])
    ]
    wait_for(lambda: for_one.handovers.incoming.num_coming == 3)
    with monkeypatch.context() as patch:
        patch.setattr(PromptService, "works", False)  # as after a minute
        tokens = [[list(list(stream)[-1].token_ids)] for stream in streams]
    assert tokens == tokens_of(answers(plain, LONG[:3], [GREEDY] * 3))
    prefill.resume()
    assert_nothing_is_held(prefill, for_one)
    assert front.links[0].backlog_tokens == 0
    unlink(front)


def test_whatever_goes_wrong_with_a_prompt_it_is_computed_by_the_decode_engine(front, prefill, plain, monkeypatch):
    expected = tokens_of(answers(plain, LONG[:2], [GREEDY] * 2))
    with monkeypatch.context() as patch:
        patch.setattr(prefill.handovers, "submit_prompt", lambda *arguments: 1 / 0)
        assert tokens_of(answers(front, LONG[:2], [GREEDY] * 2)) == expected
    [link] = front.links
    assert link.alive and link.backlog_tokens == 0


@pytest.mark.parametrize("where", ["in one process", "on the prefill engine's thread"])
def test_a_transfer_that_fails_ends_the_hand_overs_and_no_request(prefill, decode, plain, monkeypatch, where):
    front = front_of(prefill, decode)
    for engine in (prefill, decode):
        engine.reset_prefix_cache()
    [link] = front.links
    expected = tokens_of(answers(plain, LONG, [GREEDY] * 4))
    if where == "in one process":
        monkeypatch.setattr(link, "pages", lambda *arguments: 1 / 0)
    else:  # acknowledges what was never sent
        received = link.received
        monkeypatch.setattr(link, "received", lambda request_id, num_pages: received(request_id, num_pages + 1))
    assert tokens_of(answers(front, LONG, [GREEDY] * 4)) == expected
    assert not link.alive and prefill.healthy and decode.healthy
    assert tokens_of(answers(front, LONG[:1], [GREEDY])) == expected[:1]
    unlink(front)
    assert_nothing_is_held(prefill, decode)


@pytest.mark.parametrize("running", ["keep", "restart"])
def test_weights_that_differ_between_the_sides_never_make_an_answer(prefill, decode, make_engines, params, running):  # noqa: F811
    """Whichever side is changed first, and while KV is under way."""
    others = {**params, "final_norm": {"scale": -params["final_norm"]["scale"]}}
    other = make_engines(seed=9)
    other.update_params(others)
    expected = tokens_of(answers(other, LONG, [GREEDY] * 4))
    front = front_of(prefill, decode)
    for engine in (prefill, decode):
        engine.reset_prefix_cache()
    totals = decode.handovers.incoming.totals
    prefill.pause()
    streams = [
        front.submit_blocking(Request(request_id=f"r{i}", prompt_token_ids=prompt, sampling=GREEDY))
        for i, prompt in enumerate(LONG)
    ]
    decode.update_params(others, running=running)
    prefill.resume()
    assert [[list(list(stream)[-1].token_ids)] for stream in streams] == expected
    decode.reset_prefix_cache()
    before = totals.requests
    assert tokens_of(answers(front, LONG, [GREEDY] * 4)) == expected, "the prefill engine has the old ones"
    assert totals.requests == before
    prefill.update_params(others, running=running)
    decode.reset_prefix_cache()
    assert tokens_of(answers(front, LONG, [GREEDY] * 4)) == expected
    assert totals.requests == before + 4, "they have the same again"
    front.update_params(params, running=running)
    unlink(front)
    assert_nothing_is_held(prefill, decode)


def test_what_can_not_work_is_refused_by_name(front, plain, prefill, decode, make_engines):  # noqa: F811
    small_pages = make_engines(kv_transfer=True, page_size=8)
    with pytest.raises(RequestError, match="800 tokens"):
        answers(front, [[1] * 800], [GREEDY])
    with pytest.raises(ConfigError, match="kv_transfer"):
        Disaggregated(plain, front.links)
    with pytest.raises(ConfigError, match="at least one prefill"):
        Disaggregated(decode, [])
    with pytest.raises(ConfigError, match="kv_transfer"):
        LocalLink(PromptService(plain), decode)
    with pytest.raises(ConfigError, match=r"pages of 2x2x16x2x16 float32 in rows, the prefill engine of 2x2x8x"):
        LocalLink(PromptService(small_pages), decode)


@pytest.mark.parametrize(
    ("start", "asked", "param"),
    [
        (start_pairs, {"num_prefill": 0, "num_decode": 1}, "num_prefill"),
        (start_pairs, {"num_prefill": 1, "num_decode": 0}, "num_decode"),
        (start_role, {"role": "both", "peers": ("a:1",)}, "kv_role"),
        (start_role, {"role": "prefill", "peers": ("a:1",)}, "kv_peer"),
        (start_role, {"role": "decode", "peers": ()}, "kv_peer"),
    ],
)
def test_engines_that_nobody_would_work_for_are_refused_before_a_model_is_loaded(start, asked, param):
    way = {} if start is start_pairs else {"connector": "shm", "listen": "127.0.0.1:0"}
    with pytest.raises(ConfigError) as error:
        start(EngineConfig(model="/nowhere"), **asked, **way)
    assert error.value.param == param


def test_what_an_engine_did_with_hand_overs_and_host_memory_is_planned_the_same_again(
    prefill,
    make_engines,  # noqa: F811
    plain,
    tmp_path_factory,
):
    log = tmp_path_factory.mktemp("log") / "events.jsonl"
    changes = {"num_kv_pages": 70, "host_kv_gib": 0.01, "preemption": "swap", "event_log": str(log)}
    small = make_engines(kv_transfer=True, **changes)
    front = front_of(prefill, small)
    held = SamplingParams(max_tokens=30, temperature=0, structured_outputs=StructuredOutputs(regex="abc[de]{20}"))
    prompts, sampling = [*LONG, *PROMPTS, *LONG[:2], LONG[2]], [*[GREEDY] * 4, *SAMPLING, *[GREEDY] * 2, held]
    assert tokens_of(answers(front, prompts, sampling)) == tokens_of(answers(plain, prompts, sampling))
    unlink(front)
    assert_nothing_is_held(prefill, small)
    lines = log.read_text().splitlines()
    assert any('"take_moves"' in line for line in lines)
    assert sum('"adopt"' in line for line in lines) > 5 and small.stats().host_pages_cached > 0
    assert len(replay(lines)) == small.stats().steps


def test_a_prefill_engine_is_counted_by_itself(front, prefill, decode):
    parts = front.stats_by_engine()
    assert {name: stats.answers for name, stats in parts.items()} == {"decode": True, "prefill-0": False}
    assert parts["prefill-0"].kv_pages_total == prefill.stats().kv_pages_total
    assert front.stats().kv_pages_total == decode.stats().kv_pages_total


def test_a_desk_that_is_closed_takes_no_prompt_on(front, prefill):
    [link] = front.links
    link.close()
    link.begin(Request(request_id="late", prompt_token_ids=LONG[0], sampling=GREEDY), 0)
    assert link.backlog_tokens == 0


def test_a_prefill_engine_that_has_stopped_is_done_without(front, prefill, decode, monkeypatch):
    def stopped() -> None:
        raise EngineStoppedError("it has stopped")

    for name in ("sleep", "wake", "reset_prefix_cache"):
        monkeypatch.setattr(prefill, name, stopped)
    front.sleep()
    assert decode.paused
    front.wake()
    front.reset_prefix_cache()
    assert not decode.paused
