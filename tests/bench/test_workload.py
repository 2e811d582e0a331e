from __future__ import annotations

import numpy as np
import pytest

from bench.common import BenchError
from bench.workload import COMMITTED, SEED, SHAREGPT_OUTPUTS, SHAREGPT_PROMPTS, Lengths, main, make, read, to_json
from jaxcb.text import Tokenizer
from tests.text.small_tokenizers import byte_level


def test_committed_file_is_what_the_command_writes(builtin_model, tmp_path):
    main(["--out", str(tmp_path / "workload.json"), "--model", str(builtin_model)])
    assert (tmp_path / "workload.json").read_text() == COMMITTED.read_text()


def test_committed_workload_has_the_lengths_that_results_are_compared_by():
    workload = read(COMMITTED)
    assert (workload.seed, len(workload.items)) == (SEED, 32)
    assert (workload.num_prompt_tokens, workload.num_output_tokens) == (4086, 2770)


def test_committed_prompts_are_text(builtin_model):
    tokenizer = Tokenizer.from_dir(builtin_model)
    license = tokenizer.decode(tokenizer.encode((COMMITTED.parents[1] / "LICENSE").read_text()))
    assert all(tokenizer.decode(item.prompt_ids[:12]) in license + license for item in read(COMMITTED).items)


def test_same_seed_makes_the_same_workload():
    first, again, other = (to_json(make(byte_level(), seed, 20)) for seed in (5, 5, 6))
    assert first == again != other


def test_no_two_prompts_begin_alike():
    items = make(byte_level(), 5, 200).items
    assert len({tuple(item.prompt_ids[:16]) for item in items}) > 190


def test_short_contexts_shorten_prompts_and_answers():
    items = make(byte_level(), 5, 50, max_total_tokens=40).items
    assert max(len(item.prompt_ids) for item in items) == max(item.output_len for item in items) == 20


def test_file_holds_what_was_made(tmp_path):
    workload = make(byte_level(), 5, 3)
    (tmp_path / "w.json").write_text(to_json(workload))
    assert read(tmp_path / "w.json") == workload


@pytest.mark.parametrize("text", ["", "{}", '{"seed": 1, "requests": [{"prompt_ids": [1]}]}', "[]"])
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "w.json").write_text(text)
    with pytest.raises(BenchError, match="is no workload"):
        read(tmp_path / "w.json")


def test_empty_workloads_are_refused(tmp_path):
    (tmp_path / "w.json").write_text('{"seed": 1, "requests": []}')
    with pytest.raises(BenchError, match="holds no requests"):
        read(tmp_path / "w.json")


@pytest.mark.parametrize(
    ("lengths", "p50", "p90"), [(SHAREGPT_PROMPTS, 150, 796), (SHAREGPT_OUTPUTS, 140, 555)], ids=["prompts", "outputs"]
)
def test_sharegpt_lengths_have_the_percentiles_of_their_name(lengths, p50, p90):
    drawn = lengths.draw(np.random.default_rng(0), 20_000)
    assert np.percentile(drawn, [50, 90]) == pytest.approx([p50, p90], rel=0.05)
    assert (min(drawn), max(drawn)) == (lengths.low, lengths.high)


def test_scaled_lengths_keep_their_shape():
    lengths = Lengths(median=100, sigma=0.5, low=3, high=400).scaled(0.1)
    assert lengths == Lengths(median=10, sigma=0.5, low=1, high=40)
