import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import disagg
from bench.disagg import SYSTEMS, Run, goodput
from jaxcb.scheduler import SchedulerLimits
from jaxcb.sim.disaggregated import Network
from jaxcb.sim.step_time import LinearStepTime
from tests.serve.process import ROOT


def limits(**changes: object) -> SchedulerLimits:
    values = {
        "max_num_seqs": 16,
        "num_slots": 32,
        "max_num_batched_tokens": 512,
        "max_model_len": 8192,
        "num_kv_pages": 8000,
        "page_size": 16,
    } | changes
    return SchedulerLimits(**values)


def test_goodput_is_simulated_for_each_rate_and_never_exceeds_it():
    args = disagg._parser().parse_args(["--rates", "1", "50", "--requests", "60", "--ttft", "1", "--tpot", "0.05"])
    whole = limits(max_num_batched_tokens=8192, enable_chunked_prefill=False)
    model = LinearStepTime(fixed_ms=2.0, per_token_ms=0.02)
    rows = goodput(
        args, model, {"whole prompts": whole, "chunked": limits()}, Network(bytes_per_token=10**5, bandwidth=1e10)
    )
    assert [row["rate"] for row in rows] == [1, 50]
    for name in SYSTEMS:
        assert 0 < rows[0][name] <= 1.5 and rows[1][name] >= 0


def test_a_summary_holds_percentiles_over_all_rounds():
    summary = disagg._summary([Run([0.001] * 99, [1.0]), Run([0.1], [3.0])])
    assert summary["itl_p50_ms"] == pytest.approx(1) and summary["itl_p100_ms"] == pytest.approx(100)
    assert summary["ttft_p50_s"] == pytest.approx(2)
    assert summary["itl_p99_ms_median_round"] == pytest.approx(np.mean([1, 100]))


SMALL = """
    --dtype float32 --max-num-seqs 3 --max-num-batched-tokens 32 --max-model-len 128 --rounds 1 --answers 1 --prompts 2
    --prompt-tokens 64 --prompt-answer 1 --every 0.01 --requests 20 --rates 1
"""


@pytest.mark.slow
def test_all_of_it_is_measured_with_a_small_model(tiny: Path, tmp_path: Path):
    """In a process of its own, whose CPU counts as two devices."""
    command = [
        sys.executable,
        "-m",
        "bench.disagg",
        "--model",
        str(tiny),
        "--json",
        str(tmp_path / "result"),
        *SMALL.split(),
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result").read_text())
    assert set(result["systems"]) == set(SYSTEMS)
    assert all(one["itl_p99_ms"] > 0 and one["ttft_p50_s"] > 0 for one in result["systems"].values())
    assert result["transfer"]["requests"] > 0 and 0 <= result["transfer"]["hidden"] <= 1
    assert result["goodput"][0]["rate"] == 1 and "hidden" in done.stdout
