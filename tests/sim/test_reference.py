from jaxcb.sim import LinearStepTime, TraceRequest
from jaxcb.sim.__main__ import main
from jaxcb.sim.reference import continuous, reference_trace, static


def test_the_textbook_model_prints_its_two_figures():
    trace = reference_trace()
    assert f"{continuous(trace).tokens_per_s:.0f}" == "14997"
    assert f"{static(trace).tokens_per_s:.0f}" == "9124"


def test_the_newest_is_preempted_comes_back_first_and_computes_its_tokens_again():
    # Pool of 10. Step 1 admits a and b; 2: both decode, 1 token is free; 3: b goes back with a prompt of 4 and keeps c
    # (3 + 1 would fit) waiting; 4: a ends; 5: b and c are admitted; 6: both decode, c ends; 7: b ends.
    totals = continuous([TraceRequest(0.0, 4, 3), TraceRequest(0.0, 3, 3), TraceRequest(0.0, 3, 1)], num_kv_tokens=10)
    assert (totals.num_steps, totals.num_step_tokens, totals.num_preemptions) == (7, 7 + 2 + 1 + 1 + 7 + 2 + 1, 1)


def test_a_static_batch_runs_as_long_as_its_longest_output():
    step_time = LinearStepTime(fixed_ms=2.0, per_token_ms=1.0)
    totals = static([TraceRequest(0.0, 5, 1), TraceRequest(0.0, 3, 4)], step_time)
    assert totals.num_steps == 1 + 4 and totals.num_step_tokens == 8 + 4 * 2
    assert abs(totals.seconds - (10 + 4 * 4) / 1e3) < 1e-12


def test_the_command_sets_the_real_scheduler_beside_the_model(capsys):
    assert main(["reference", "--no-progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    figures = {
        name.strip(): numbers.split() for line in lines if "," in line for name, numbers in [(line[:30], line[30:])]
    }
    assert figures["static, textbook"] == ["9124", "107.46", "8,958", "3,036,420", "0"]
    assert figures["continuous, textbook"] == ["14997", "65.38", "4,459", "2,028,357", "0"]
    assert figures["jaxcb, run-ahead off"] == ["15015", "65.30", "4,451", "2,026,357", "0"]
    assert figures["jaxcb, run-ahead on"] == ["15009", "65.33", "4,458", "2,026,357", "0"]
    assert "2,000 tokens fewer, -8 steps" in lines[-1] and "+7 steps" in lines[-1]
