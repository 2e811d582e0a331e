"""The exercises of a course on serving, each with its worked value, through the command line."""

import pytest

from jaxcb.plan import formulas
from jaxcb.plan.__main__ import main


def printed(capsys, command):
    assert main(command.split()) == 0
    return capsys.readouterr().out


def test_exercise_1_static_batching_of_five_lengths_uses_44_percent(capsys):
    out = printed(capsys, "static 50,150,400,80,200")
    assert "880 tokens in 5 x 400 slot-steps, utilization 44.0%" in out and "2.27 times as much" in out
    assert formulas.static_utilization([50, 150, 400, 80, 200]) == pytest.approx(0.44)


def test_the_three_lengths_of_the_text_use_40_7_percent(capsys):
    assert "40.7%" in printed(capsys, "static 10,100,500")


def test_exercise_2_a_7b_model_on_an_80_gb_card_serves_201_requests(capsys):
    out = printed(capsys, "requests --memory-gb 80 --weights-gb 14 --kv-kb 160 --context 2048")
    assert out.startswith("201 requests: 66 GB for KV, 0.328 GB a request")


def test_exercise_3_chunks_of_800_tokens_hold_100_ms_and_the_longest_prompt_follows(capsys):
    out = printed(capsys, "chunk --ttft-ms 500 --itl-ms 100 --prefill 10000 --decode 50")
    assert "a chunk of at most 800 tokens: (100 - 20) ms at 10000 tokens/s" in out
    assert "500 ms can promise has 3,200 tokens, one that comes between two steps 4,000" in out


def test_exercise_4_swapping_4096_tokens_over_pcie_takes_20_5_ms(capsys):
    out = printed(capsys, "swap --tokens 4096 --kv-kb 160 --link-gbs 32")
    assert out.startswith("20.5 ms one way: 4,096 tokens of 160 KB are 0.655 GB")


def test_exercise_5_a_shared_prefix_scales_beyond_the_number_of_requests(capsys):
    out = printed(capsys, "prefix --users 1,4,8 --prefix 4000 --suffix 100 --output 50")
    assert "more than k below 1 + P / U = 41.0" in out
    rows = [[float(x) for x in line.split()] for line in out.splitlines()[-3:]]
    assert [row[0] for row in rows] == [1, 4, 8]
    for users, formula, simulated, a_user in rows:
        assert simulated > users and a_user > 1  # super-linear
        assert simulated == pytest.approx(formula, rel=0.03)


def test_the_speedup_by_hand_is_superlinear_up_to_its_bound():
    def speedup(k):
        return formulas.prefix_speedup(k, prefix=900, suffix=100, output=10, token_s=1e-3, decode_s=(0.1, 0.1))

    # One alone: 1,000 tokens in 1 s and 10 decodes in 1 s. Four together: 400 tokens in 0.4 s, the same decodes.
    assert speedup(4) == pytest.approx(4 * 2.0 / 1.4)
    assert formulas.superlinear_until(prefix=900, suffix=100) == 10
    assert speedup(9) > 9 and speedup(10) == pytest.approx(10) and speedup(11) < 11


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("requests --memory-gb 10 --weights-gb 14 --kv-kb 160 --context 2048", "the model is larger than the card"),
        (
            "chunk --ttft-ms 500 --itl-ms 10 --prefill 10000 --decode 50",
            "alone takes 20 ms, the limit is 10 ms",
        ),
    ],
)
def test_what_cannot_work_is_one_line(capsys, command, message):
    assert main(command.split()) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1


@pytest.mark.parametrize("command", ["static 5,0", "static x", "swap --tokens -4 --kv-kb 1", "chunk --ttft-ms nan"])
def test_numbers_that_are_none_are_refused(capsys, command):
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert "must be a positive" in capsys.readouterr().err
