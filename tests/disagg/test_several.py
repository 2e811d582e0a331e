"""Two decode engines behind one queue, or two prefill engines, of which one dies: what had not begun is answered as by
one engine, what had begun ends with an error, and no pool holds a page for anybody."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import pytest

from jaxcb.cluster import Replicas
from jaxcb.disagg import Disaggregated, LocalLink, PromptService
from jaxcb.engine import Engine
from jaxcb.request import FinishReason, SamplingParams
from tests.disagg.run import answers, assert_nothing_is_held, keep_roles, tokens_of, wait_for

LONG = [[(7 * i * j + 3 * j) % 250 for j in range(500)] for i in range(1, 5)]
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
STAGES = {"first pages": ("scatter_pages", 0, 61), "first step": ("launch", 0, 62), "answers": ("launch", 4, 63)}
"""What an engine dies of: the call of its runner, how many of them work, and a seed that makes it an engine apart."""


@pytest.fixture(autouse=True)
def roles_are_kept(monkeypatch) -> None:
    keep_roles(monkeypatch)


@contextlib.contextmanager
def behind_one_queue(prefill: Sequence[Engine], decode: Sequence[Engine]) -> Iterator[Replicas]:
    """As start_pairs and the server make them, over engines that outlive it."""
    for engine in (*prefill, *decode):
        engine.reset_prefix_cache()
    services = [PromptService(engine) for engine in prefill]
    fronts = [
        Disaggregated(
            engine, [LocalLink(service, engine) for service in services], prefill if engine is decode[0] else ()
        )
        for engine in decode
    ]
    replicas = Replicas(fronts)  # type: ignore[arg-type]  # as in serve.disaggregation
    try:
        yield replicas
    finally:
        with replicas._changed:
            replicas._stopping = True
            replicas._changed.notify_all()
        replicas._thread.join()
        for front in fronts:
            front._stopping.set()
            front._watcher.join()
            for link in front.links:
                link.close()


def test_requests_are_shared_out_over_both_and_all_their_pages_are_handed_over(prefill, decode, make_engines, plain):
    second = make_engines(kv_transfer=True, num_kv_pages=398)
    expected = tokens_of(answers(plain, LONG * 2, [GREEDY] * 8))
    before = [engine.handovers.incoming.totals.requests for engine in (decode, second)]
    with behind_one_queue([prefill], [decode, second]) as replicas:
        assert tokens_of(answers(replicas, LONG * 2, [GREEDY] * 8)) == expected
        parts = replicas.stats_by_engine()
        assert set(parts) == {"0", "1", "prefill-0"} and parts["prefill-0"].prompt_tokens == 0
        assert parts["0"].kv_pages_total == decode.limits.num_kv_pages, "what the router goes by"
    counts = [engine.handovers.incoming.totals.requests for engine in (decode, second)]
    assert all(after > count for after, count in zip(counts, before, strict=True))
    assert_nothing_is_held(prefill, decode, second)


@pytest.mark.parametrize("stage", STAGES)
def test_a_decode_engine_dies_beside_another(prefill, decode, make_engines, plain, stage):
    expected = tokens_of(answers(plain, LONG * 2, [GREEDY] * 8))
    name, num_left, seed = STAGES[stage]
    broken = make_engines(kv_transfer=True, seed=seed)
    works, calls = getattr(broken._runner, name), []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) > num_left:
            raise RuntimeError("the device is gone")
        return works(*arguments)

    setattr(broken._runner, name, fails)
    with behind_one_queue([prefill], [broken, decode]) as replicas:
        outputs = answers(replicas, LONG * 2, [GREEDY] * 8)
        failed = [i for i, [output] in enumerate(outputs) if output.finish_reason is FinishReason.ERROR]
        right = [given == wanted for given, wanted in zip(tokens_of(outputs), expected, strict=True)]
        assert all(right[i] or i in failed for i in range(8))
        assert len(failed) < 8 and not broken.healthy and replicas.healthy
        if stage == "first pages":
            assert not failed, "nothing of them had been sent"
        else:
            assert all(outputs[i][0].token_ids for i in failed), "and of these something had"
        assert tokens_of(answers(replicas, LONG, [GREEDY] * 4)) == expected[:4], "the other goes on"
    assert_nothing_is_held(prefill, decode)


def test_a_prefill_engine_dies_beside_another(prefill, decode, make_engines, plain):
    expected = tokens_of(answers(plain, LONG, [GREEDY] * 4))
    broken = make_engines(kv_transfer=True, seed=64)
    gather, calls = broken._runner.gather_pages, []

    def fails(pages):
        calls.append(pages)
        if len(calls) > 1:
            raise RuntimeError("the device is gone")
        return gather(pages)

    broken._runner.gather_pages = fails
    with behind_one_queue([broken, prefill], [decode]) as replicas:
        [front] = replicas.engines
        assert tokens_of(answers(replicas, LONG, [GREEDY] * 4)) == expected
        assert not broken.healthy and replicas.healthy
        wait_for(lambda: [link.alive for link in front.links] == [False, True])
        decode.reset_prefix_cache()
        before = decode.handovers.incoming.totals.requests
        assert tokens_of(answers(replicas, LONG, [GREEDY] * 4)) == expected
        assert decode.handovers.incoming.totals.requests == before + 4, "the other prefill engine has all of them"
    assert_nothing_is_held(prefill, decode)
