"""KV that was computed elsewhere: its pages are found like any cached prefix."""

import random

from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler
from tests.scheduler.fake_device import limits

EXACT = SamplingParams(max_tokens=4, ignore_eos=True)


def add(scheduler, request_id, prompt):
    return scheduler.add(Request(request_id=request_id, prompt_token_ids=prompt, sampling=EXACT))


def test_a_request_starts_behind_the_pages_that_were_placed():
    scheduler = Scheduler(limits())
    prompt = list(range(10, 21))
    placed = scheduler.prefixes.place(prompt)
    assert [index for index, _ in placed] == [0, 1] and scheduler.num_live_pages == 0
    add(scheduler, "a", prompt)
    (row,) = scheduler.plan().rows
    assert (row.start, row.num_tokens) == (8, 3)
    assert row.sequence.pages[:2] == [page for _, page in placed]
    scheduler.check()


def test_what_is_known_already_is_not_placed_again():
    scheduler = Scheduler(limits())
    scheduler.prefixes.place(list(range(10, 18)))
    assert [index for index, _ in scheduler.prefixes.place(list(range(10, 22)))] == [2]
    assert scheduler.prefixes.place(list(range(10, 22))) == []
    scheduler.check()


def test_another_salt_finds_nothing():
    scheduler = Scheduler(limits())
    scheduler.prefixes.place(list(range(10, 21)), cache_salt="x")
    add(scheduler, "a", list(range(10, 21)))
    assert scheduler.plan().rows[0].start == 0


def test_pages_that_are_in_use_are_left_alone():
    scheduler = Scheduler(limits(num_kv_pages=16, max_model_len=48))
    add(scheduler, "a", [1] * 44)  # 12 of 16 pages
    plan = scheduler.plan()
    assert [index for index, _ in scheduler.prefixes.place(list(range(100, 140)))] == [0, 1, 2, 3]
    scheduler.commit(plan, [0])
    scheduler.check()


def test_without_prefix_caching_there_is_no_place():
    assert Scheduler(limits(enable_prefix_caching=False)).prefixes.place(list(range(20))) == []


def test_placing_amid_a_run_with_a_second_tier_leaks_nothing():
    seed = 5
    print("seed", seed)
    draw = random.Random(seed)
    scheduler = Scheduler(limits(num_kv_pages=24, num_host_pages=8))
    prompts = [[group] * 12 + [draw.randrange(50) for _ in range(8)] for group in (1, 2, 3) for _ in range(4)]
    for step in range(400):
        if draw.random() < 0.4:
            scheduler.prefixes.place(draw.choice(prompts))
        if draw.random() < 0.3 and scheduler.num_waiting < 5:
            add(scheduler, str(step), draw.choice(prompts))
        if (plan := scheduler.plan()) is not None:
            scheduler.commit(plan, [draw.randrange(50) for _ in plan.rows])
        scheduler.check()
