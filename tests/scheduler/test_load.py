from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, StepLoad, load_of
from tests.scheduler.fake_device import limits


def test_the_load_of_a_step_counts_the_kv_once_a_row_and_the_pairs_under_the_causal_mask():
    scheduler = Scheduler(limits(max_num_batched_tokens=4))
    scheduler.add(Request(request_id="a", prompt_token_ids=[1] * 4, sampling=SamplingParams(ignore_eos=True)))
    scheduler.commit(plan := scheduler.plan(), [0])
    assert load_of(plan) == StepLoad(num_tokens=4, kv_tokens=4, num_pairs=1 + 2 + 3 + 4)
    scheduler.add(Request(request_id="b", prompt_token_ids=[2] * 6, sampling=SamplingParams(ignore_eos=True)))
    scheduler.commit(plan := scheduler.plan(), [0, 0])
    assert load_of(plan) == StepLoad(num_tokens=4, kv_tokens=5 + 3, num_pairs=5 + (1 + 2 + 3))
    plan = scheduler.plan()
    assert load_of(plan) == StepLoad(num_tokens=4, kv_tokens=6 + 6, num_pairs=6 + (4 + 5 + 6))


def test_guesses_are_computed_too():
    scheduler = Scheduler(limits(), drafter=lambda sequence, most: [7, 8], num_draft_tokens=2)
    scheduler.add(Request(request_id="a", prompt_token_ids=[1] * 4, sampling=SamplingParams(ignore_eos=True)))
    scheduler.commit(scheduler.plan(), [0])
    assert load_of(scheduler.plan()) == StepLoad(num_tokens=3, kv_tokens=7, num_pairs=5 + 6 + 7)
