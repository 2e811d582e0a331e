"""Random arrivals, aborts, stops, tiny pools and budgets: every answer equals what the request gets alone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.request import FinishReason, SamplingParams
from tests.scheduler.fake_device import answer_alone, driver

MAX_MODEL_LEN = 24

request = st.fixed_dictionaries(
    {
        "prefix": st.integers(0, 2),  # requests with the same number begin alike
        "length": st.integers(1, MAX_MODEL_LEN - 1),
        "max_tokens": st.one_of(st.none(), st.integers(1, 16)),
        "ignore_eos": st.booleans(),
        "stop": st.lists(st.integers(0, 49), max_size=2),
        "arrives_after": st.integers(0, 4),
        "aborts_after": st.one_of(st.none(), st.integers(0, 6)),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    requests=st.lists(request, min_size=1, max_size=10),
    depth=st.integers(0, 2),
    num_seqs=st.integers(1, 4),
    budget=st.sampled_from([1, 2, 3, 15, 16, 17, 64]),
    page_size=st.sampled_from([2, 4, 8]),
    spare_pages=st.integers(0, 6),
    prefix_caching=st.booleans(),
    watermark=st.sampled_from([0.0, 0.2]),
)
def test_every_answer_is_that_of_the_request_alone(
    requests, depth, num_seqs, budget, page_size, spare_pages, prefix_caching, watermark
):
    d = driver(
        depth,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        page_size=page_size,
        num_kv_pages=-(-MAX_MODEL_LEN // page_size) + spare_pages,
        enable_prefix_caching=prefix_caching,
        admission_watermark=watermark,
    )
    wanted: dict[str, list[int]] = {}
    aborts: dict[int, list[str]] = {}
    step = 0
    for number, spec in enumerate(requests):
        prompt = [(5 * spec["prefix"] + i) % 50 for i in range(spec["length"])]
        room = MAX_MODEL_LEN - len(prompt)
        sampling = SamplingParams(
            max_tokens=None if spec["max_tokens"] is None else min(spec["max_tokens"], room),
            ignore_eos=spec["ignore_eos"],
            stop_token_ids=tuple(spec["stop"]),
        )
        name = str(number)
        for _ in range(spec["arrives_after"]):
            d.step()
            step += 1
            for aborted in aborts.pop(step, ()):
                d.scheduler.finish(aborted, FinishReason.ABORT)
        d.add(name, prompt, sampling)
        wanted[name] = answer_alone(prompt, sampling, MAX_MODEL_LEN)
        if spec["aborts_after"] is not None:
            aborts.setdefault(step + 1 + spec["aborts_after"], []).append(name)
    while aborts:
        d.step()
        step += 1
        for aborted in aborts.pop(step, ()):
            d.scheduler.finish(aborted, FinishReason.ABORT)
    d.run(max_steps=5_000)

    aborted = {str(i) for i, spec in enumerate(requests) if spec["aborts_after"] is not None}
    for name, answer in wanted.items():
        if name in d.finished:
            assert d.answers[name] == answer
            by_token = answer[-1] in d.finished[name].sequence.end_ids
            assert d.finished[name].finish_reason is (FinishReason.STOP if by_token else FinishReason.LENGTH)
        else:
            assert name in aborted
            assert d.answers[name] == answer[: len(d.answers[name])]
    assert d.scheduler.num_live_pages == 0
    assert d.scheduler.pool.num_free == d.scheduler.pool.num_pages
