import numpy as np
import pytest

from bench import disagg
from bench.disagg import SYSTEMS, Run, goodput
from jaxcb.scheduler import SchedulerLimits
from jaxcb.sim.disaggregated import Network
from jaxcb.sim.step_time import LinearStepTime


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
