from __future__ import annotations

import argparse
import json

import pytest

from bench.common import BenchError
from bench.peers import Server, main, measure, parse_server, single, summarize
from bench.workload import COMMITTED, make, read, to_json
from jaxcb.text import Tokenizer
from tests.bench.conftest import FLAGS
from tests.bench.fake_server import MODEL, fake_server, right_answer
from tests.text.small_tokenizers import byte_level


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("http://h:1", ("h:1", "http://h:1", None)),
        ("llama=http://h:1/v1/", ("llama", "http://h:1", None)),
        ("llama=https://h:1,m/n", ("llama", "https://h:1", "m/n")),
        ("http://h:1?a=b", ("h:1?a=b", "http://h:1?a=b", None)),
    ],
)
def test_servers_are_named_on_the_command_line(text, server):
    assert parse_server(text) == server


@pytest.mark.parametrize("text", ["", "llama", "llama=h:1", "ftp://h"])
def test_what_is_no_url_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must be"):
        parse_server(text)


def test_servers_take_turns_and_no_round_repeats_a_prompt():
    order: list[str] = []
    first: list[dict] = []
    second: list[dict] = []
    workload = make(byte_level(), 0, 3, max_total_tokens=16)

    def noting(name):
        def answer(fields):
            order.append(name)
            return right_answer(fields)

        return answer

    with fake_server(noting("a"), first) as a, fake_server(noting("b"), second) as b:
        servers = [Server("a", a, MODEL), Server("b", b, MODEL)]
        rounds = measure(servers, workload, num_rounds=2, seed=0, progress=False)
    assert order == (["a"] * 3 + ["b"] * 3) * 3
    assert [len(rounds["a"]), len(rounds["b"])] == [2, 2]
    openings = [{fields["prompt"][0] for fields in first[i : i + 3]} for i in (0, 3, 6)]
    assert all(len(opening) == 1 for opening in openings)
    assert len(set.union(*openings)) == 3
    prompts = sorted(list(item.prompt_ids)[1:] for item in workload.items)
    for received in (first, second):
        for i in (0, 3, 6):
            assert sorted(fields["prompt"][1:] for fields in received[i : i + 3]) == prompts


def test_summary_compares_the_first_server_with_the_others():
    ours = [_metrics(out_tok_s=300, ttft_p50_s=1), _metrics(out_tok_s=30, ttft_p50_s=10)]
    theirs = [_metrics(out_tok_s=100, ttft_p50_s=2), _metrics(out_tok_s=20, ttft_p50_s=40)]
    summary = summarize({"ours": ours, "theirs": theirs})
    assert summary["medians"]["ours"]["out_tok_s"] == 165
    assert summary["out_tok_s_range"] == {"ours": [30, 300], "theirs": [20, 100]}
    assert summary["ratios"] == {"ours / theirs": {"out_tok_s": 2.25, "ttft_p50_s": 0.375, "tpot_p50_ms": 1}}


def test_single_is_one_short_prompt_and_a_long_answer():
    (item,) = single(read(COMMITTED)).items
    assert (len(item.prompt_ids), item.output_len) == (32, 128)


def test_two_servers_cannot_share_a_name():
    flags = ["--url", "x=http://h:1,m", "--url", "x=http://h:2,m"]
    with pytest.raises(BenchError, match="same name"):
        main(flags)


def test_our_own_server_beside_another(tiny, tmp_path, capsys):
    workload = make(Tokenizer.from_dir(tiny), 1, 6, max_total_tokens=40)
    (tmp_path / "w.json").write_text(to_json(workload))
    with fake_server(right_answer) as url:
        flags = ["--url", f"fake={url}", "--start", "--rounds", "2", "--workload", str(tmp_path / "w.json")]
        result = main([*flags, "--json", str(tmp_path / "r.json"), "--", "--model", str(tiny), *FLAGS])
    assert json.loads((tmp_path / "r.json").read_text()) == result
    assert [server["name"] for server in result["servers"]] == ["jaxcb", "fake"]
    assert result["medians"]["jaxcb"]["out_tok_s"] > 0
    assert list(result["ratios"]["jaxcb / fake"]) == ["out_tok_s", "ttft_p50_s", "tpot_p50_ms"]
    printed = capsys.readouterr().out
    assert "machine: cpu " in printed and str(workload) in printed and "jaxcb / fake: out tok/s x" in printed


def test_a_server_that_cannot_start_is_an_error(tmp_path):
    with pytest.raises(BenchError, match="serve ended with status 1"):
        main(["--", "--model", str(tmp_path / "none")])


def _metrics(**values: float) -> dict[str, float]:
    return {
        "out_tok_s": 1.0,
        "total_tok_s": 1.0,
        "ttft_p50_s": 1.0,
        "ttft_p95_s": 1.0,
        "tpot_p50_ms": 1.0,
        "tpot_p95_ms": 1.0,
        "wall_s": 1.0,
        "client_cpu_s": 1.0,
    } | values
