from __future__ import annotations

import functools
import io
import json

import numpy as np
import pytest

from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler.replay import ReplayError, checksum, main, replay
from jaxcb.structured_outputs import StructuredOutputs
from tests.scheduler.fake_device import answer_alone, recording_driver
from tests.scheduler.fuzz import Fuzz


def recorded(seed: int) -> tuple[Fuzz, list[str], list[int]]:
    """A random life, its log, and the checksums of its plans."""
    file = io.StringIO()
    checksums: list[int] = []
    fuzz = Fuzz(seed, make=lambda depth, drafter, **changes: recording_driver(file, depth, **changes))
    plan = fuzz.driver.scheduler.plan

    @functools.wraps(plan)
    def noted():
        step = plan()
        if step is not None:
            checksums.append(checksum(step))
        return step

    fuzz.driver.scheduler.plan = noted
    fuzz.run(200)
    return fuzz, file.getvalue().splitlines(), checksums


@pytest.mark.parametrize("seed", [1, 2, 3, 4, 5, 6])
def test_a_recorded_life_is_planned_the_same_again(seed):
    _, lines, checksums = recorded(seed)
    assert [checksum(plan) for plan in replay(lines)] == checksums
    assert len(checksums) > 50


def test_a_plan_that_differs_is_named_by_its_line():
    _, lines, _ = recorded(1)
    at = next(i for i, line in enumerate(lines) if json.loads(line).get("plan"))
    lines[at] = json.dumps({"plan": json.loads(lines[at])["plan"] ^ 1})
    with pytest.raises(ReplayError, match=f"line {at + 1}: step 0 is planned otherwise"):
        replay(lines)


@pytest.mark.parametrize("line", ["{", "{}", "[]", '{"dance": 1}', '{"commit": 99, "sampled": []}'])
def test_a_line_that_is_not_of_a_log_is_named(line):
    _, lines, _ = recorded(1)
    with pytest.raises(ReplayError, match="line 2 "):
        replay([lines[0], line])


def test_a_policy_of_ones_own_is_given_again():
    file = io.StringIO()
    d = recording_driver(file, policy=backwards, max_num_seqs=1)
    for name in "abc":
        d.add(name, [1, 2, 3], SamplingParams(max_tokens=2))
    d.run()
    plans = replay(file.getvalue().splitlines(), policy=backwards)
    assert plans[0].rows[0].sequence.request.request_id == "c"
    with pytest.raises(ReplayError, match=r"a policy that is a function .*backwards.*policy=\.\.\."):
        replay(file.getvalue().splitlines())


def test_a_beginning_that_was_placed_is_placed_again():
    file = io.StringIO()
    d = recording_driver(file)
    prompt = list(range(10, 21))
    assert len(d.scheduler.prefixes.place(prompt)) == 2
    d.scheduler.add(Request(request_id="a", prompt_token_ids=prompt))
    assert d.scheduler.plan().rows[0].start == 8
    assert replay(file.getvalue().splitlines())[0].rows[0].start == 8


def backwards(sequence, view):
    return -sequence.ticket


def test_the_command_says_whether_the_plans_are_the_same(tmp_path, capsys):
    _, lines, checksums = recorded(2)
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines))
    assert main([str(log)]) == 0
    assert f"{len(checksums)} steps" in capsys.readouterr().out
    assert main([str(tmp_path / "absent")]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_request_that_is_held_to_a_grammar_is_planned_the_same_again():
    """Its forced tokens are in the log, and its parameters come back out of it."""
    file = io.StringIO()
    d = recording_driver(file, depth=1)
    answer = answer_alone([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True), 64)
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, structured_outputs=StructuredOutputs(choice=("a", "b")))
    d.add("a", [5, 6, 7], sampling)
    d.foresee("a", answer, 6)
    d.run()
    assert d.answers["a"] == answer
    plans = replay(file.getvalue().splitlines())
    assert [checksum(plan) for plan in plans] == [checksum(plan) for plan in d.plans]
    assert any(plan.num_foreseen for plan in plans)
    assert plans[0].chunks[0].sequence.request.sampling == sampling


def test_a_restart_is_in_the_log():
    file = io.StringIO()
    d = recording_driver(file, depth=0)
    d.add("a", [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
    for _ in range(4):
        d.step()
    d.scheduler.restart_all()
    d.run()
    assert [checksum(plan) for plan in replay(file.getvalue().splitlines())] == [checksum(plan) for plan in d.plans]
    assert sum(plan.num_tokens for plan in d.plans) > 3 + 9, "tokens are computed again"


def test_a_request_with_what_json_can_not_say_is_recorded_all_the_same():
    """vLLM's extra_args may be anything; numbers may be numpy's."""
    file = io.StringIO()
    d = recording_driver(file)
    for name, extra_args in (("a", {"states": np.zeros(3), 1: (2,)}), ("b", {"bytes": b"x"}), ("c", {"key": [1]})):
        d.scheduler.add(
            Request(
                request_id=name,
                prompt_token_ids=[1, 2, 3],
                sampling=SamplingParams(max_tokens=2, extra_args=extra_args),
                priority=np.float32(1.5),
                arrival_s=np.int64(2),
                ttft_deadline_s=np.float32(0.5),
            )
        )
    while (plan := d.scheduler.plan()) is not None:
        d.scheduler.commit(plan, [5] * plan.num_rows)
    plans = replay(file.getvalue().splitlines())
    requests = {row.sequence.request.request_id: row.sequence.request for plan in plans for row in plan.rows}
    assert requests["a"].priority == 1.5 and requests["a"].sampling.extra_args is None
    assert requests["c"].sampling.extra_args == {"key": [1]}
