"""Host time of plan + commit, against running sequences and against waiting requests, under every policy.

The pool is ample, and the device is a list of dummy tokens: what is left is the scheduler. A *steady* step decodes all
that run, and whoever waits can't be admitted, since every place is taken. With *changes* one sequence ends in a step,
and one is taken out of the queue in its place.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from bench import common
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits
from jaxcb.scheduler.policy import POLICIES

RUNNING = (1, 4, 16, 64, 256, 1024, 4096)
WAITING = (0, 100, 1_000, 10_000, 100_000)
COMPARED = (1_000, 100_000)
"""Waiting requests between which the cost should not differ."""
RUNNING_BESIDE_WAITING = 256
PROMPT_LENS = range(57, 73)
"""A page of lengths, so that as many sequences fill a page in one step as in another."""
VOCABULARY = 50_000
MAX_MODEL_LEN = 100_000


class Case(NamedTuple):
    running: int
    waiting: int = 0
    policy: str = "fcfs"
    changes: bool = False


class Loaded:
    """A scheduler with everything admitted, in the middle of its decodes, running one step ahead."""

    def __init__(self, case: Case, seed: int):
        self._case, self._rng = case, random.Random(seed)
        num_running = case.running
        self._turn = max(num_running - 1, 1)  # its place is taken again in the step after the next
        pages = num_running * 512 + 64
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=num_running,
                max_num_batched_tokens=max(2048, num_running),
                max_model_len=MAX_MODEL_LEN,
                num_kv_pages=max(pages, MAX_MODEL_LEN // 16 + 1),
                page_size=16,
                num_slots=2 * num_running,
                policy=case.policy,
            )
        )
        self._tokens = self._rng.choices(range(VOCABULARY), k=num_running)
        self._num_added = 0
        endless = MAX_MODEL_LEN - PROMPT_LENS.stop
        for i in range(num_running):  # with changes they end one after the other
            self._add(i + 4 if case.changes else endless)
        self._plan = self.scheduler.plan()
        while self.scheduler.num_waiting:
            self._step()
        for _ in range(case.waiting):
            self._add(self._turn if case.changes else endless)
        while self._plan is None or self._plan.num_decodes < num_running - case.changes:
            self.step()

    def step(self) -> float:
        """Plan step k + 1, commit step k. Returns seconds of CPU, which neighbours on the machine disturb least."""
        while self.scheduler.num_waiting < self._case.waiting:
            self._add(self._turn)
        return self._step()

    def _step(self) -> float:
        started_s = time.thread_time()
        following = self.scheduler.plan()
        if self._plan is not None:
            self.scheduler.commit(self._plan, self._tokens[: self._plan.num_rows])
        self._plan = following
        return time.thread_time() - started_s

    def _add(self, max_tokens: int) -> None:
        ids = self._rng.choices(range(VOCABULARY), k=self._rng.choice(PROMPT_LENS))
        number, self._num_added = self._num_added, self._num_added + 1
        self.scheduler.add(
            Request(
                request_id=str(number),
                prompt_token_ids=ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
                arrival_s=float(number),
                ttft_deadline_s=60.0,
                tenant=f"tenant {number % 7}",
                priority=number % 3 if self._case.policy == "priority" and number >= self._case.running else 0,
            )
        )


def measure(cases: Iterable[Case], num_steps: int, rounds: int, seed: int = 0) -> dict[Case, float]:
    """Median microseconds of plan + commit. Cases take turns, so that the machine's slow minutes fall on all."""
    loaded = {
        case: filled(case, seed) for case in tqdm(list(cases), desc="filling", disable=not common.show_progress())
    }
    times: dict[Case, list[float]] = {case: [] for case in loaded}
    gc.collect()
    gc.freeze()  # the requests are not what is measured
    for _ in tqdm(range(rounds), desc="measuring", disable=not common.show_progress()):
        for case, one in loaded.items():
            times[case] += [one.step() * 1e6 for _ in range(num_steps)]
    gc.unfreeze()
    return {case: float(np.median(values)) for case, values in times.items()}


def filled(case: Case, seed: int) -> Loaded:
    """Without the garbage collector, which looks through a growing queue again and again."""
    gc.disable()
    try:
        return Loaded(case, seed)
    finally:
        gc.enable()


def main() -> None:
    parser = common.make_parser("scheduler", __doc__, seed=0, seed_help="of the token ids")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="fcfs", help="of the first table; default fcfs")
    parser.add_argument("--steps", type=common.positive, default=32, metavar="N", help="steps a round; default 32")
    parser.add_argument("--rounds", type=common.positive, default=10, metavar="N", help="default 10")
    args = parser.parse_args()
    facts = common.machine()
    print(common.describe(facts), flush=True)
    by_load = [Case(n, 0, args.policy) for n in RUNNING]
    by_load += [Case(RUNNING_BESIDE_WAITING, n, args.policy) for n in WAITING if n]
    times = measure(by_load, args.steps, args.rounds, args.seed)
    print(f"\nmicroseconds of a steady step, policy {args.policy}, medians of {args.steps * args.rounds} steps\n")
    rows = [(f"{c.running:,}", f"{c.waiting:,}", f"{us:,.1f}", f"{us / c.running:.2f}") for c, us in times.items()]
    print(common.markdown_table(("running", "waiting", "us a step", "us a token"), rows), flush=True)
    times |= _by_policy(args)
    common.save(args.json, {"machine": facts, "us": [{**case._asdict(), "us": us} for case, us in times.items()]})


def _by_policy(args: argparse.Namespace) -> dict[Case, float]:
    """Every policy by the length of the queue, one at a time: a queue of 100,000 takes memory."""
    times: dict[Case, float] = {}
    rows = []
    for policy in POLICIES:
        for changes in (False, True):
            pair = [Case(RUNNING_BESIDE_WAITING, n, policy, changes) for n in COMPARED]
            times |= measure(pair, args.steps, args.rounds, args.seed)
            few, many = (times[case] for case in pair)
            rows.append(
                (policy, "changes" if changes else "steady", f"{few:,.1f}", f"{many:,.1f}", f"{many / few:.3f}")
            )
    print(f"\nmicroseconds of a step with {RUNNING_BESIDE_WAITING} running, by policy and waiting requests\n")
    print(common.markdown_table(("policy", "step", *(f"{n:,}" for n in COMPARED), "ratio"), rows))
    return times


if __name__ == "__main__":
    raise SystemExit(common.run(main))
