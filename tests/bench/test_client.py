from __future__ import annotations

import pytest

from bench.client import Answer, Replay, only_model, replay
from bench.common import BenchError
from bench.workload import Item
from tests.bench.fake_server import MODEL, error, fake_server, right_answer, token, usage

ITEMS = [Item([1, 2, 3], 4), Item([5, 6], 1)]


def test_answers_are_asked_for_with_their_exact_length():
    received: list[dict] = []
    chunks = []
    with fake_server(right_answer, received) as url:
        result = replay(url, MODEL, ITEMS, on_token=lambda: chunks.append(1))
    assert [answer.num_tokens for answer in result.answers] == [4, 1]
    assert (result.num_prompt_tokens, len(chunks)) == (5, 5)
    assert sorted((tuple(fields["prompt"]), fields["max_tokens"], fields["min_tokens"]) for fields in received) == [
        ((1, 2, 3), 4, 4),
        ((5, 6), 1, 1),
    ]
    assert all(fields["ignore_eos"] and fields["stream"] and fields["temperature"] == 0 for fields in received)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([token(), usage(1)], "asked for 4 tokens, the answer has 1"),
        ([token()] * 5 + [usage(5)], "asked for 4 tokens, the answer has 5"),
        ([token()] * 4, "without tokens or without its usage"),
        ([usage(4)], "without tokens or without its usage"),
        ([token(), error("out of pages")], "out of pages"),
        ([], "without tokens or without its usage"),
    ],
    ids=["short", "long", "no usage", "no tokens", "error", "nothing"],
)
def test_an_answer_of_another_length_ends_the_replay(pieces, message):
    with fake_server(lambda _: pieces) as url, pytest.raises(BenchError, match=message):
        replay(url, MODEL, ITEMS[:1])


def test_a_refusal_is_passed_on():
    with (
        fake_server(lambda _: [b"no such model"]) as url,
        pytest.raises(BenchError, match="status 404: no such model"),
    ):
        replay(url, "other", ITEMS)


def test_a_server_that_is_not_there_is_named():
    with fake_server(right_answer) as url:
        assert only_model(url) == MODEL
    with pytest.raises(BenchError, match=f"{url}.*ConnectionRefusedError"):
        replay(url, MODEL, ITEMS)
    with pytest.raises(BenchError, match=f"{url}/v1/models names no model"):
        only_model(url)


def test_metrics_of_known_times():
    answers = [
        Answer(sent_s=0.0, token_times_s=[1.0, 3.0], num_tokens=5),  # TTFT 1, TPOT 0.5
        Answer(sent_s=0.5, token_times_s=[2.5, 3.5], num_tokens=2),  # TTFT 2, TPOT 1
        Answer(sent_s=0.5, token_times_s=[3.5], num_tokens=1),  # TTFT 3, no TPOT
    ]
    metrics = Replay(answers=answers, num_prompt_tokens=32, wall_s=4.0, client_cpu_s=0.1).metrics()
    assert metrics["out_tok_s"] == 2.0
    assert metrics["total_tok_s"] == 10.0
    assert (metrics["ttft_p50_s"], metrics["ttft_p95_s"]) == (2.0, 2.9)
    assert (metrics["tpot_p50_ms"], metrics["tpot_p95_ms"]) == (750.0, 975.0)


@pytest.mark.parametrize("num_tokens", [1, 3], ids=["one token", "all in one piece"])
def test_without_gaps_there_is_no_time_per_later_token(num_tokens):
    answers = [Answer(sent_s=0.0, token_times_s=[1.0], num_tokens=num_tokens)]
    metrics = Replay(answers=answers, num_prompt_tokens=1, wall_s=1.0, client_cpu_s=0.1).metrics()
    assert "tpot_p50_ms" not in metrics
