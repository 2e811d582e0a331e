"""Host time of plan + commit, against running sequences and against waiting requests.

Every running sequence decodes, the pool is ample, and the device is a list of dummy tokens: what is left is the
scheduler. The waiting requests can't be admitted, since every slot is taken.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable

import numpy as np
from tqdm import tqdm

from bench import common
from jaxcb.request import Request, SamplingParams
from jaxcb.scheduler import Scheduler, SchedulerLimits
from jaxcb.scheduler.policy import POLICIES

RUNNING = (1, 4, 16, 64, 256, 1024, 4096)
WAITING = (0, 100, 1_000, 10_000, 100_000)
RUNNING_BESIDE_WAITING = 256
PROMPT_LEN = 64
VOCABULARY = 50_000
MAX_MODEL_LEN = 100_000


class Loaded:
    """A scheduler with everything admitted, in the middle of its decodes, running one step ahead."""

    def __init__(self, num_running: int, num_waiting: int, policy: str, seed: int):
        rng = random.Random(seed)
        pages = num_running * 512 + 64
        self.scheduler = Scheduler(
            SchedulerLimits(
                max_num_seqs=num_running,
                max_num_batched_tokens=max(2048, num_running),
                max_model_len=MAX_MODEL_LEN,
                num_kv_pages=max(pages, MAX_MODEL_LEN // 16 + 1),
                page_size=16,
                num_slots=2 * num_running,
                policy=policy,
            )
        )
        sampling = SamplingParams(temperature=0.0, max_tokens=MAX_MODEL_LEN - PROMPT_LEN, ignore_eos=True)
        for i in range(num_running + num_waiting):
            ids = rng.choices(range(VOCABULARY), k=PROMPT_LEN)
            self.scheduler.add(Request(request_id=str(i), prompt_token_ids=ids, sampling=sampling, arrival_s=float(i)))
        self._plan = self.scheduler.plan()
        self._tokens = rng.choices(range(VOCABULARY), k=num_running)
        while self.scheduler.num_running < num_running or self._has_prompts():
            self.step()

    def step(self) -> float:
        """Plan step k + 1, commit step k. Returns seconds of CPU, which neighbours on the machine disturb least."""
        started_s = time.thread_time()
        following = self.scheduler.plan()
        if self._plan is not None:
            self.scheduler.commit(self._plan, self._tokens[: self._plan.num_rows])
        self._plan = following
        return time.thread_time() - started_s

    def _has_prompts(self) -> bool:
        return self._plan is None or self._plan.num_decodes < self.scheduler.num_running


def measure(
    cases: Iterable[tuple[int, int]], policy: str, num_steps: int, rounds: int, seed: int = 0
) -> dict[tuple[int, int], float]:
    """Median microseconds of plan + commit, by (running, waiting). Cases take turns, so that the machine's slow minutes
    fall on all of them."""
    cases = list(cases)
    loaded = {
        case: Loaded(case[0], case[1], policy, seed)
        for case in tqdm(cases, desc="filling", disable=not common.show_progress())
    }
    times: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    gc.collect()
    gc.freeze()  # the requests are not what is measured
    for _ in tqdm(range(rounds), desc="measuring", disable=not common.show_progress()):
        for case, one in loaded.items():
            times[case] += [one.step() * 1e6 for _ in range(num_steps)]
    gc.unfreeze()
    return {case: float(np.median(values)) for case, values in times.items()}


def main() -> None:
    parser = common.make_parser("scheduler", __doc__, seed=0, seed_help="of the token ids")
    parser.add_argument("--policy", choices=tuple(POLICIES), default="fcfs", help="default fcfs")
    parser.add_argument("--steps", type=common.positive, default=32, metavar="N", help="steps a round; default 32")
    parser.add_argument("--rounds", type=common.positive, default=10, metavar="N", help="default 10")
    args = parser.parse_args()
    facts = common.machine()
    by_running = measure([(n, 0) for n in RUNNING], args.policy, args.steps, args.rounds, args.seed)
    by_waiting = measure(
        [(RUNNING_BESIDE_WAITING, n) for n in WAITING], args.policy, args.steps, args.rounds, args.seed
    )
    print(common.describe(facts))
    print(f"\nmicroseconds of plan + commit, policy {args.policy}, medians of {args.steps * args.rounds} steps\n")
    rows = [(f"{n:,}", "0", f"{us:,.1f}", f"{us / n:.2f}") for (n, _), us in by_running.items()]
    rows += [(f"{n:,}", f"{w:,}", f"{us:,.1f}", f"{us / n:.2f}") for (n, w), us in by_waiting.items()]
    print(common.markdown_table(("running", "waiting", "us a step", "us a token"), rows))
    common.save(
        args.json,
        {
            "machine": facts,
            "policy": args.policy,
            "us": [{"running": n, "waiting": w, "us": us} for (n, w), us in (by_running | by_waiting).items()],
        },
    )


if __name__ == "__main__":
    raise SystemExit(common.run(main))
