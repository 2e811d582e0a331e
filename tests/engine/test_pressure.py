"""Public reports of engines that went wrong under pressure: short of pages, beside a huge prompt, in one burst."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

from jaxcb.engine import Engine, OutputStream
from jaxcb.request import FinishReason, Request, RequestOutput, SamplingParams
from tests.engine.conftest import SPEC
from tests.engine.run import complete
from tests.engine.test_page_moves import PAGE_GIB

ROOMY = {"max_num_seqs": 4, "enable_prefix_caching": False}
TIGHT = {"max_num_seqs": 4, "num_kv_pages": 24, "max_model_len": 256, "admission_watermark": 0.0}


def exactly(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def ordinary(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, SPEC.vocab_size, length).tolist()


def streamed(engine: Engine, prompts: list[list[int]], sampling: SamplingParams) -> list[list[RequestOutput]]:
    """Every output of every prompt, all submitted at once."""
    streams = [
        engine.submit(Request(request_id=f"{i}", prompt_token_ids=prompt, sampling=sampling))
        for i, prompt in enumerate(prompts)
    ]
    return [list(stream) for stream in streams]


def until_idle(engine: Engine) -> None:
    deadline_s = time.monotonic() + 10
    while (stats := engine.stats()).num_running or stats.num_waiting or stats.kv_pages_used:
        assert time.monotonic() < deadline_s, stats
        time.sleep(0.01)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_answer_is_whole_and_streams_every_token_once(caching, preemption, make_engines):
    """vllm#16832, nano-vllm#211: after an eviction and a recompute the answer came back short or different."""
    prompts = [ordinary(64, seed) for seed in range(4)]
    alone = [complete(make_engines(**ROOMY), [prompt], exactly(128))[0] for prompt in prompts]
    host = {"host_kv_gib": 64 * PAGE_GIB} if preemption == "swap" else {}
    engine = make_engines(**TIGHT, enable_prefix_caching=caching, preemption=preemption, **host)
    before = engine.stats()
    for outputs, wanted in zip(streamed(engine, prompts, exactly(128)), alone, strict=True):
        last = outputs[-1]
        assert last.token_ids == wanted.token_ids and last.text == wanted.text and len(last.token_ids) == 128
        assert last.finish_reason is FinishReason.LENGTH
        assert [token for output in outputs for token in output.new_token_ids] == wanted.token_ids
        assert "".join(output.new_text for output in outputs) == wanted.text
    after = engine.stats()
    assert after.preemptions > before.preemptions
    assert (after.swaps > before.swaps) == (preemption == "swap")
    until_idle(engine)
    assert engine.stats().num_swapped == engine.stats().host_pages_swapped == 0


def test_a_huge_prompt_neither_stops_a_stream_nor_keeps_a_short_newcomer_waiting(make_engines):
    """vllm#21495: one very long prompt blocked short newcomers, and slowed running streams by an order of magnitude."""
    engine = make_engines(max_num_seqs=4, max_num_batched_tokens=32)
    prompts = {"stream": ordinary(16, 1), "huge": ordinary(600, 2), "short": ordinary(8, 3)}
    lengths = {"stream": 90, "huge": 4, "short": 4}
    alone = {name: complete(engine, [prompts[name]], exactly(lengths[name]))[0].token_ids for name in prompts}

    def submit(name: str) -> OutputStream:
        return engine.submit(
            Request(
                request_id=name,
                prompt_token_ids=prompts[name],
                sampling=exactly(lengths[name]),
                cache_salt="nothing is cached",
                arrival_s=time.monotonic(),
            )
        )

    stream = submit("stream")
    outputs = [next(stream)]
    others = {name: submit(name) for name in ("huge", "short")}
    last = {name: list(other)[-1] for name, other in others.items()}
    outputs += list(stream)
    assert {name: output.token_ids for name, output in last.items()} | {"stream": outputs[-1].token_ids} == alone
    huge, short = last["huge"], last["short"]
    assert short.first_token_s - short.arrival_s < 0.5 * (huge.first_token_s - huge.arrival_s)


@pytest.mark.parametrize("budget", [32, 64, 640])
def test_one_of_a_burst_with_a_common_beginning_leaves_and_the_others_answer_the_same(budget, make_engines):
    """nano-vllm#208, with one of the requests aborted while the beginning that they share is being computed."""
    common = ordinary(160, 7)
    prompts = [[*common, i, i + 1, i + 2] for i in range(8)]
    plain = make_engines(enable_prefix_caching=False, max_num_batched_tokens=budget)
    scored = dataclasses.replace(exactly(12), logprobs=1)
    alone = [complete(plain, [prompt], scored)[0] for prompt in prompts]
    wanted = [output.token_ids for output in alone]
    engine = make_engines(max_num_batched_tokens=budget)
    for leaving in (0, 3):
        streams = [
            engine.submit(
                Request(request_id=f"{i}", prompt_token_ids=prompt, sampling=scored, cache_salt=f"{leaving} leaves")
            )
            for i, prompt in enumerate(prompts)
        ]
        streams[leaving].abort()
        last = [list(stream)[-1] for stream in streams]
        assert last[leaving].token_ids == wanted[leaving][: len(last[leaving].token_ids)]
        for i, output in enumerate(last):
            if i != leaving:
                assert output.token_ids == wanted[i]
                np.testing.assert_allclose(output.logprobs.logprobs, alone[i].logprobs.logprobs, atol=1e-3)
        until_idle(engine)


def test_the_choice_between_swapping_and_recomputing_goes_by_a_link_that_was_measured(make_engines):
    engine = make_engines(**TIGHT, host_kv_gib=64 * PAGE_GIB)
    scheduler = engine._scheduler
    assert 0 < scheduler.preemption.host_page_s != scheduler.limits.host_page_s
    never = make_engines(**TIGHT, host_kv_gib=64 * PAGE_GIB, preemption="swap")._scheduler
    assert never.preemption.host_page_s == never.limits.host_page_s, "it has no choice to make"
