import json

import pytest

from jaxcb.errors import ConfigError
from jaxcb.sim import TraceRequest, load_trace, make_trace


def written(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def test_azure_csv(tmp_path):
    file = written(
        tmp_path,
        "azure.csv",
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0319600,3180,8\n",
    )
    assert load_trace(file) == [TraceRequest(0.0, 4808, 10), TraceRequest(pytest.approx(0.052), 3180, 8)]


def test_mooncake_jsonl_shares_its_blocks(tmp_path):
    rows = [
        {"timestamp": 27_000, "input_length": 1300, "output_length": 52, "hash_ids": [46, 47, 48]},
        {"timestamp": 30_500, "input_length": 1024, "output_length": 26, "hash_ids": [46, 47]},
    ]
    file = written(tmp_path, "mooncake.jsonl", "\n".join(map(json.dumps, rows)))
    first, second = load_trace(file)
    assert first == TraceRequest(0.0, 1300, 52, ((46, 512), (47, 512), (48, 276)))
    assert second == TraceRequest(3.5, 1024, 26, ((46, 512), (47, 512)))


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("burst.csv", "Timestamp,Model,Request tokens,Response tokens\n5,GPT-4,472,18\n45,ChatGPT,1087,230\n", 40.0),
        ("vidur.csv", "arrived_at,num_prefill_tokens,num_decode_tokens\n1.5,472,18\n3.0,1087,230\n", 1.5),
        ("guidellm.jsonl", '{"prompt": "a", "prompt_tokens_count": 472, "output_tokens_count": 18}\n\n'
         '{"prompt": "b", "prompt_tokens_count": 1087, "output_tokens_count": 230}\n', 0.0),
        ("plain.jsonl", '{"prompt_len": 472, "output_len": 18, "arrival_s": 2}\n'
         '{"prompt_len": 1087, "output_len": 230, "arrival_s": 2.25}\n', 0.25),
    ],
)  # fmt: skip
def test_other_tools_columns_are_known(tmp_path, name, text, expected):
    file = written(tmp_path, name, text)
    assert load_trace(file) == [TraceRequest(0.0, 472, 18), TraceRequest(expected, 1087, 230)]


def test_rows_are_put_in_the_order_of_their_arrivals(tmp_path):
    file = written(tmp_path, "a.csv", "arrival_s,prompt_len,output_len\n9,1,1\n4,2,2\n")
    assert load_trace(file) == [TraceRequest(0.0, 2, 2), TraceRequest(5.0, 1, 1)]


def test_a_file_is_a_trace_by_name_with_its_own_times_or_drawn_ones(tmp_path):
    file = written(tmp_path, "a.csv", "arrival_s,prompt_len,output_len\n" + "0.5,7,3\n" * 2000)
    assert make_trace(str(file), 3) == [TraceRequest(0.0, 7, 3)] * 3
    drawn = make_trace(str(file), rate=4.0)
    assert drawn[-1].arrival_s == pytest.approx(500, rel=0.1)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "arrival_s,prompt_len,output_len\n1,5,5\n2,x,5\n", "line 3: prompt_len must be a positive integer"),
        ("a.csv", "arrival_s,prompt_len,output_len\n1,5,0\n", "line 2: output_len must be a positive integer, got '0'"),
        ("a.csv", "arrival_s,prompt_len,output_len\n1,5\n", "line 2: none of the columns GeneratedTokens"),
        ("a.csv", "arrival_s,prompt_len,output_len\nlate,5,5\n", "line 2: arrival_s can't be read as a time: 'late'"),
        ("a.csv", "arrival_s,prompt_len,output_len\nnan,5,5\n", "line 2: arrival_s must be finite"),
        ("a.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\n16.11.,5,5\n", "line 2: TIMESTAMP can't be read"),
        ("a.csv", "arrival_s,prompt_len,output_len\n", "holds no requests"),
        ("a.jsonl", '{"prompt_len": 1, "output_len": 1}\n\n{"prompt_len": 1,', "line 3: no JSON"),
        ("a.jsonl", '{"prompt_len": 1, "output_len": 1}\n[1]', "line 2: expected an object"),
        ("a.jsonl", '{"prompt_len": 1, "output_len": 1.5}', "line 1: output_len must be a positive integer, got 1.5"),
        ("a.jsonl", '{"prompt_len": 1, "output_len": true}', "line 1: output_len must be a positive integer, got True"),
        ("a.jsonl", '{"input_length": 600, "output_length": 1, "hash_ids": [1]}', "names 1 blocks of 512 tokens"),
        ("a.jsonl", '{"input_length": 6, "output_length": 1, "hash_ids": ["x"]}', "must be a list of integers"),
    ],
)  # fmt: skip
def test_a_malformed_row_is_refused_by_its_line(tmp_path, name, text, message):
    file = written(tmp_path, name, text)
    with pytest.raises(ConfigError, match=message) as error:
        load_trace(file)
    assert str(file) in str(error.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="can't read the trace"):
        make_trace(str(tmp_path / "none.csv"))
