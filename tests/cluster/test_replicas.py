"""Which engine is given a request, and when: by room, by what its cache holds and by load; and what becomes of it when
engines fail."""

from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxcb.cluster import Replicas
from jaxcb.cluster.beginnings import BLOCK_TOKENS
from jaxcb.cluster.choice import MOST_AHEAD
from jaxcb.engine import EngineStats, ServingEngine
from jaxcb.errors import ConfigError, EngineStoppedError, QueueFullError, RequestError
from jaxcb.request import FinishReason, Request, SamplingParams

from .fake_engine import FakeEngine

PREFIX = list(range(100))
Make = Callable[..., tuple[Replicas, list[FakeEngine]]]


@pytest.fixture
def cluster() -> Iterator[Make]:
    """Makes engines and what stands before them, and ends it."""
    made: list[Replicas] = []

    def make(count: int, **changes: Any) -> tuple[Replicas, list[FakeEngine]]:
        engines = [FakeEngine(**changes) for _ in range(count)]
        made.append(Replicas(engines))  # type: ignore[arg-type]  # stand-ins
        return made[-1], engines

    yield make
    for replicas in made:
        replicas.shutdown()


def request(name: str, prompt: list[int] | None = None, *, sampling: dict[str, Any] | None = None, **more: Any):
    prompt = [int(name) % 250 + 1 if name.isdigit() else 1] if prompt is None else prompt
    return Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**(sampling or {})), **more)


def taken(engines: list[FakeEngine]) -> list[list[str]]:
    return [engine.taken for engine in engines]


def eventually(condition: Callable[[], bool]) -> None:
    """The router works on a thread of its own."""
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


# ---------------------------------------------------------------------- who is given it


def test_short_prompts_go_to_the_idlest(cluster: Make):
    replicas, engines = cluster(3)
    for i in range(9):
        replicas.submit(request(str(i)))
    assert [len(engine.taken) for engine in engines] == [3, 3, 3]


def test_a_beginning_stays_with_its_engine_until_that_is_too_far_ahead(cluster: Make):
    replicas, engines = cluster(2)
    for i in range(MOST_AHEAD + 2):
        replicas.submit(request(str(i), [*PREFIX, i]))
    assert [len(engine.taken) for engine in engines] == [MOST_AHEAD + 1, 1], "the last: the home is too far ahead"


def test_of_two_engines_that_know_a_beginning_the_one_that_knows_more_of_it_is_chosen(cluster: Make):
    replicas, engines = cluster(2)
    long = [i % 250 for i in range(4 * BLOCK_TOKENS)]
    replicas.submit(request("a", long[: 2 * BLOCK_TOKENS]))
    replicas.submit(request("b", [9] * BLOCK_TOKENS))  # to the other, for load
    replicas.submit(request("c", [9] * BLOCK_TOKENS + long))
    replicas.submit(request("d", [*long, 1]))
    replicas.submit(request("e", [*long, 2]))
    assert taken(engines) == [["a", "d", "e"], ["b", "c"]]


def test_another_salt_is_another_beginning(cluster: Make):
    replicas, engines = cluster(2)
    replicas.submit(request("a", PREFIX))
    replicas.submit(request("b", PREFIX, cache_salt="x"))
    replicas.submit(request("c", PREFIX))
    assert taken(engines) == [["a", "c"], ["b"]], "b to the idlest"


def test_a_reset_of_the_caches_forgets_the_homes(cluster: Make):
    replicas, engines = cluster(2)
    replicas.submit(request("a", PREFIX))
    replicas.submit(request("b", PREFIX))
    replicas.reset_prefix_cache()
    replicas.submit(request("c", PREFIX))
    assert taken(engines) == [["a", "b"], ["c"]]
    assert all(engine.did == ["reset"] for engine in engines)


def test_a_home_without_room_is_passed_by_where_another_has_room(cluster: Make):
    replicas, engines = cluster(2, max_num_seqs=2)
    for name in "abc":
        replicas.submit(request(name, PREFIX))
    assert taken(engines) == [["a", "b"], ["c"]]


# ---------------------------------------------------------------------- the queue


def test_what_no_engine_has_room_for_goes_to_the_first_that_gets_room(cluster: Make):
    replicas, engines = cluster(2, max_num_seqs=1)
    for name in "abcd":
        replicas.submit(request(name))
    assert taken(engines) == [["a"], ["b"]] and replicas.stats().num_waiting == 2
    engines[1].end(engines[1].stream_of("b"))
    eventually(lambda: taken(engines) == [["a"], ["b", "c"]])
    engines[1].end(engines[1].stream_of("c"))
    eventually(lambda: taken(engines) == [["a"], ["b", "c", "d"]])
    assert replicas.stats().num_waiting == 0


def test_prompts_that_wait_in_an_engine_count_against_its_free_pages(cluster: Make):
    replicas, engines = cluster(2, pages=10, admits=False)
    for i in range(3):
        replicas.submit(request(str(i), [i] * 90))  # 6 pages
    assert taken(engines) == [["0"], ["1"]], "two don't fit one engine"
    engines[0].admits = True
    eventually(lambda: taken(engines) == [["0", "2"], ["1"]])


@pytest.mark.parametrize(
    ("policy", "fields", "order"),
    [
        ("fcfs", {}, "bcde"),
        ("priority", {"b": {"priority": 2}, "c": {"priority": 1}, "d": {"priority": 0}, "e": {"priority": 1}}, "dceb"),
        ("deadline", {"c": {"ttft_deadline_s": 9.0}, "e": {"ttft_deadline_s": 5.0}}, "ecbd"),
        ("sjf", {"b": {"sampling": {"max_tokens": 9}}, "d": {"sampling": {"max_tokens": 2}}}, "dbce"),
        ("fair", {"b": {"tenant": "x"}, "c": {"tenant": "x"}, "d": {"tenant": "y"}, "e": {"tenant": "x"}}, "bdce"),
        (lambda sequence, view: -sequence.request.arrival_s, {}, "edcb"),
    ],
)
def test_the_queue_is_in_the_order_of_the_policy(cluster: Make, policy, fields, order):
    replicas, [engine] = cluster(1, max_num_seqs=1, policy=policy, priority_ageing_s=1e6)
    replicas.submit(request("a", tenant="z", priority=0))
    for i, name in enumerate("bcde"):
        replicas.submit(request(name, arrival_s=float(i), **fields.get(name, {})))
    for count in range(2, 6):
        engine.end(engine.stream_of(engine.taken[-1]))
        eventually(lambda count=count: len(engine.taken) == count)
    assert "".join(engine.taken) == f"a{order}"


def test_a_tenant_that_was_idle_has_no_turns_saved_up(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=1, policy="fair", length_predictor="max_tokens")
    for name in "abc":
        replicas.submit(request(name, tenant="x"))
    for name in "ab":
        engine.end(engine.stream_of(name))
        eventually(lambda name=name: engine.taken[-1] == chr(ord(name) + 1))
    replicas.submit(request("d", tenant="x"))
    for name in "ef":
        replicas.submit(request(name, tenant="y"))
    for name in "ced":
        engine.end(engine.stream_of(name))
        eventually(lambda name=name: len(engine.taken) == "abced".index(name) + 2)
    assert "".join(engine.taken) == "abcedf"


def test_an_urgent_request_goes_to_an_engine_that_makes_room_for_it(cluster: Make):
    replicas, engines = cluster(2, max_num_seqs=1, policy="priority")
    replicas.submit(request("a", priority=1))
    replicas.submit(request("b", priority=5))
    replicas.submit(request("c", priority=3))
    replicas.submit(request("d", priority=4))
    assert taken(engines) == [["a"], ["b", "c"]], "c takes the place of b, and d finds nothing that counts for less"


def test_a_head_that_finds_no_room_is_passed_by_so_often(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=3, max_passes=2)
    replicas.submit(request("a"))
    replicas.submit_choices(request("b", sampling={"n": 3}))
    for name in "cde":
        replicas.submit(request(name))
    assert engine.taken == ["a", "c", "d"]
    for name in "acd":
        engine.end(engine.stream_of(name))
    eventually(lambda: engine.taken == ["a", "c", "d", "b"])


def test_the_queue_is_bounded_by_answers(cluster: Make):
    replicas, _engines = cluster(1, max_num_seqs=1)
    for i in range(4):
        replicas.submit(request(str(i)))
    with pytest.raises(QueueFullError, match="3 requests are waiting, the limit is 5"):
        replicas.submit_choices(request("many", sampling={"n": 3}), blocking=True)


def test_the_answers_of_a_request_go_to_one_engine_together(cluster: Make):
    replicas, engines = cluster(2, max_num_seqs=3)
    replicas.submit(request("a"))
    streams = replicas.submit_choices(request("b", sampling={"n": 3, "seed": 7}))
    assert taken(engines) == [["a"], ["b"]]
    assert [stream.index for stream in streams] == [0, 1, 2]
    assert len({stream.request.sampling.seed for stream in streams}) == 3
    with pytest.raises(RequestError, match="in use"):
        replicas.submit(request("b"))


# ---------------------------------------------------------------------- ends


def test_a_request_that_is_dropped_in_the_queue_never_reaches_an_engine(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=2)
    replicas.submit_choices(request("a", sampling={"n": 2}))
    dropped = replicas.submit(request("b"))
    part = replicas.submit_choices(request("c", sampling={"n": 2}))
    dropped.abort()
    dropped.abort()
    part[0].abort()
    assert list(dropped)[-1].finish_reason is FinishReason.ABORT
    assert list(part[0])[-1].finish_reason is FinishReason.ABORT
    for index in (0, 1):
        engine.end(engine.stream_of("a", index))
    eventually(lambda: engine.taken == ["a", "c"])
    engine.end(part[1])
    assert list(part[1])[-1].finish_reason is FinishReason.STOP
    assert replicas.stats().finished["abort"] == 2
    replicas.submit(request("b"))  # the name is free again


def test_the_answers_of_a_request_of_which_some_were_dropped_keep_its_place(cluster: Make):
    """They have the rank of the whole, so nothing but their order in the queue tells them apart."""
    replicas, [engine] = cluster(1, max_num_seqs=3)
    replicas.submit_choices(request("a", sampling={"n": 2}))
    replicas.submit_choices(request("b", sampling={"n": 2}))
    first, *others = replicas.submit_choices(request("c", sampling={"n": 3}))
    first.abort()
    assert replicas.stats().num_waiting == 4
    for index in (0, 1):
        engine.end(engine.stream_of("a", index))
    eventually(lambda: engine.taken == ["a", "b", "c"])
    for stream in [*(engine.stream_of("b", index) for index in (0, 1)), others[0]]:
        engine.end(stream)
    eventually(lambda: engine.taken == ["a", "b", "c", "c"])
    engine.end(others[1])
    assert {list(stream)[-1].finish_reason for stream in others} == {FinishReason.STOP}


def test_an_abort_means_the_client_s_name_not_what_an_engine_calls_a_request(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=2)
    stream, other = [replicas.submit(request(name)) for name in ("a", "0-a")]
    assert list(engine.running) == ["0-a", "1-0-a"]
    replicas.abort("0-a")
    assert list(other)[-1].finish_reason is FinishReason.ABORT
    assert list(engine.running) == ["0-a"] and not engine.did
    engine.end(stream)


def test_nothing_is_queued_again_once_nobody_hands_out_any_more(cluster: Make):
    replicas, engines = cluster(2)
    stream = replicas.submit(request("a"))
    engines[0].shutdown = lambda drain_s: engines[0].fail()
    engines[1].shutdown = lambda drain_s: None
    replicas.shutdown()
    assert stream._ended


def test_all_answers_of_a_request_are_retried_when_their_engine_fails(cluster: Make):
    replicas, engines = cluster(2, max_num_seqs=4)
    replicas.submit(request("a"))
    replicas.submit_choices(request("b", sampling={"n": 3}))
    assert taken(engines) == [["a"], ["b"]]
    engines[1].fail()
    eventually(lambda: taken(engines)[0] == ["a", "b", "b", "b"])


@pytest.mark.parametrize(
    ("token", "error", "engine_failed"),
    [(14, "not here", False), (15, "the router failed: OSError: broken", True)],
)
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "from the queue"])
def test_a_request_that_only_an_engine_refuses_ends_with_the_reason_and_the_others_go_on(
    cluster: Make, token, error, engine_failed, waits
):
    replicas, [engine] = cluster(1, max_num_seqs=2)
    if waits:
        running = replicas.submit_choices(request("a", sampling={"n": 2}))
    streams = replicas.submit_choices(request("b", [token], sampling={"n": 2}))
    behind = replicas.submit(request("c"))
    if waits:
        for stream in running:
            engine.end(stream)
    for stream in streams:
        [*_, last] = stream
        assert (last.finish_reason, last.error, last.engine_failed) == (FinishReason.ERROR, error, engine_failed)
    eventually(lambda: engine.taken[-1:] == ["c"])
    engine.end(behind)
    assert not replicas._open and not any(member.load for member in replicas._members)
    replicas.submit(request("b"))  # the name is free again


def test_when_routing_itself_fails_nobody_waits_for_ever(cluster: Make, monkeypatch):
    replicas, [engine] = cluster(1, max_num_seqs=1)
    running, waiting = [replicas.submit(request(name)) for name in "ab"]
    with monkeypatch.context() as patch:
        patch.setattr(replicas._queue, "head", lambda: 1 / 0)
        [*_, last] = waiting
    assert last.engine_failed and "ZeroDivisionError" in last.error
    engine.end(running)
    replicas.submit(request("c"))
    assert engine.taken == ["a", "c"]


def test_abort_by_name_reaches_the_queue_and_the_engines(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=1)
    streams = [replicas.submit(request(name)) for name in "ab"]
    for name in "ab":
        replicas.abort(name)
    assert [list(stream)[-1].finish_reason for stream in streams] == [FinishReason.ABORT] * 2
    assert not engine.running


def test_what_has_sent_no_token_is_computed_on_another_engine_when_its_own_fails(cluster: Make):
    replicas, engines = cluster(2)
    streams = {name: replicas.submit(request(name)) for name in "abc"}
    choices = replicas.submit_choices(request("d", sampling={"n": 2}))
    assert taken(engines) == [["a", "c"], ["b", "d"]]
    engines[0].token(streams["c"])
    engines[1].token(choices[1])
    engines[0].fail()
    eventually(lambda: taken(engines)[1] == ["b", "d", "a"])
    [*_, last] = streams["c"]
    assert (last.finish_reason, last.engine_failed, last.error) == (FinishReason.ERROR, True, "the engine failed")
    engines[1].token(streams["a"], 5)
    engines[1].end(streams["a"])
    [*_, last] = streams["a"]
    assert (last.finish_reason, list(last.token_ids), last.error) == (FinishReason.STOP, [5], None)
    finished = replicas.stats().finished
    assert (finished["error"], finished["stop"]) == (1, 1), "c and a: each has ended once"
    assert replicas.healthy and {k: s.state for k, s in replicas.stats_by_engine().items()} == {
        "0": "stopped",
        "1": "ok",
    }


def test_a_request_that_brings_engines_down_is_tried_twice_and_no_more(cluster: Make):
    replicas, engines = cluster(3)
    stream = replicas.submit(request("a"))
    engines[0].fail()
    eventually(lambda: functools.reduce(operator.iadd, taken(engines), []) == ["a", "a"])
    next(engine for engine in engines if engine.running).fail()
    [*_, last] = stream
    assert last.engine_failed and replicas.healthy


def test_when_the_last_engine_fails_what_waits_ends_too(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=1)
    streams = [replicas.submit(request(name)) for name in "ab"]
    engine.fail()
    errors = [list(stream)[-1].error for stream in streams]
    assert errors == ["the engine failed", "every engine has failed"]
    assert not replicas.healthy and not replicas.accepting
    with pytest.raises(EngineStoppedError):
        replicas.submit(request("c"))


def test_an_engine_that_hangs_is_given_nothing(cluster: Make):
    replicas, engines = cluster(2)
    engines[0].stalled_s = 100.0
    for name in "ab":
        replicas.submit(request(name))
    assert taken(engines) == [[], ["a", "b"]]


def test_a_pause_holds_the_queue_too(cluster: Make):
    replicas, engines = cluster(2)
    replicas.pause()
    replicas.submit(request("a"))
    assert all(engine.paused for engine in engines) and not functools.reduce(operator.iadd, taken(engines), [])
    replicas.resume()
    eventually(lambda: functools.reduce(operator.iadd, taken(engines), []) == ["a"])


def test_control_reaches_every_engine_that_runs(cluster: Make):
    replicas, engines = cluster(3)
    engines[1].fail()
    replicas.update_params("new", running="keep")
    replicas.sleep()
    replicas.wake()
    assert engines[0].did == engines[2].did == [("update", "new", "keep"), "sleep", "wake"] and not engines[1].did
    assert not replicas.paused
    for engine in engines:
        engine.fail()
    with pytest.raises(EngineStoppedError, match="no engine is running"):
        replicas.reset_prefix_cache()


def test_an_engine_that_stops_amid_a_control_keeps_it_from_no_other(cluster: Make, monkeypatch):
    replicas, engines = cluster(3)

    def stops() -> None:
        engines[0].fail()
        raise EngineStoppedError("it has stopped")

    monkeypatch.setattr(engines[0], "sleep", stops)
    replicas.sleep()
    assert engines[1].did == engines[2].did == ["sleep"]


def test_engines_that_compute_prompts_for_others_have_no_part_in_what_those_have_room_for(cluster: Make, monkeypatch):
    """One hangs, and is full: its pages are nobody's room, its steps are its own, and answers are made all the same."""
    replicas, engines = cluster(2, pages=100)
    waits = dataclasses.replace(engines[0].stats(), kv_pages_total=7, stalled_s=100.0, steps=5, answers=False)
    own = engines[0].stats

    def by_engine() -> dict[str, EngineStats]:
        return {"decode": own(), "prefill-0": waits}

    monkeypatch.setattr(engines[0], "stats_by_engine", by_engine)
    monkeypatch.setattr(engines[0], "stats", lambda: ServingEngine.stats(engines[0]))  # type: ignore[arg-type]  # a stand-in
    for name in "ab":
        replicas.submit(request(name))
    assert taken(engines) == [["a"], ["b"]]
    states = {name: stats.state for name, stats in replicas.stats_by_engine().items()}
    assert states == {"0": "ok", "prefill-0": "stalled", "1": "ok"}
    total = replicas.stats()
    assert (total.kv_pages_total, total.steps, total.state) == (200, 0, "ok")
    engines[0].healthy = False  # the one that answers; the other goes on for the second
    replicas.reset_prefix_cache()
    assert engines[0].did == engines[1].did == ["reset"]


def test_a_drain_lets_the_queue_run_dry(cluster: Make):
    replicas, [engine] = cluster(1, max_num_seqs=1)
    streams = [replicas.submit(request(name)) for name in "ab"]
    drain = threading.Thread(target=replicas.shutdown, kwargs={"drain_s": 30.0})
    drain.start()
    eventually(lambda: not replicas.accepting)
    with pytest.raises(EngineStoppedError):
        replicas.submit(request("c"))
    engine.end(streams[0])
    eventually(lambda: engine.taken == ["a", "b"])
    engine.end(streams[1])
    drain.join(timeout=10)
    assert not drain.is_alive()
    assert [list(stream)[-1].finish_reason for stream in streams] == [FinishReason.STOP] * 2


def test_a_shutdown_without_a_drain_ends_what_waits(cluster: Make):
    replicas, [_engine] = cluster(1, max_num_seqs=1)
    _, waiting = [replicas.submit(request(name)) for name in "ab"]
    replicas.shutdown()
    assert list(waiting)[-1].finish_reason is FinishReason.ABORT


# ---------------------------------------------------------------------- refusals


def test_an_impossible_request_is_refused_at_once(cluster: Make):
    replicas, engines = cluster(2)
    with pytest.raises(RequestError, match="unlucky"):
        replicas.submit(request("a", [13]))
    assert not any(engine.taken for engine in engines)


def test_engines_that_do_not_belong_together_are_refused():
    with pytest.raises(ConfigError, match="at least one"):
        Replicas([])
    one, other = FakeEngine(), FakeEngine()
    other.name = "other"
    with pytest.raises(ConfigError, match="fake, other"):
        Replicas([one, other])  # type: ignore[list-item]  # stand-ins
