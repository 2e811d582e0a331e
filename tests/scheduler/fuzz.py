"""Random life for a scheduler of random limits, against the oracle of ``fake_device``."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable

from jaxcb.errors import ConfigError, RequestError
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler import SchedulerLimits
from tests.scheduler.fake_device import Driver, answer_alone, driver

MAX_MODEL_LEN = 24
BUDGETS = (1, 2, 3, 15, 16, 17, 64)


def random_changes(rng: random.Random) -> dict[str, object]:
    """Limits for ``driver``: small pools and budgets, and every knob now and then."""
    page_size = rng.choice((2, 4, 8))
    smallest = -(-MAX_MODEL_LEN // page_size)
    changes: dict[str, object] = {
        "max_num_seqs": rng.randint(1, 5),
        "max_num_batched_tokens": rng.choice(BUDGETS),
        "max_model_len": MAX_MODEL_LEN,
        "page_size": page_size,
        "num_kv_pages": smallest + rng.choice((0, 0, 1, 2, 3, 5, 8, 20)),
        "num_host_pages": rng.choice((0, 0, 1, 3, 8, 30)),
        "enable_prefix_caching": rng.random() < 0.7,
        "admission_watermark": rng.choice((0.0, 0.0, 0.01, 0.2)),
    }
    some = {
        "policy": ("sjf", "priority", "prefix", "deadline", "fair"),
        "length_predictor": ("max_tokens",),
        "priority_ageing_s": (math.inf, 5.0),
        "max_overtakes": (1, 3),
        "max_passes": (1, 4),
        "batching": ("static",),
        "prefill_first": (True,),
        "max_chunk_tokens": (1, 5),
        "max_num_partial_prefills": (1, 2),
        "long_prefill_token_threshold": (0, 1, 4),
        "exact_fill": (True,),
        "itl_target_ms": (5.0,),
        "waiting_served_ratio": (0.5, 2.0),
        "max_waiting_steps": (2,),
        "reservation": ("guaranteed", "full"),
        "preemption": ("swap", "swap", "recompute"),
        "victim": ("least_progress",),
        "step_sizes": ((4, 8, 16, 64),),
        "sliding_window": (3, 4, 9),
    }
    for name, values in some.items():
        if rng.random() < 0.25:
            changes[name] = rng.choice(values)
    if rng.random() < 0.1:
        changes |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "exact_fill": False}
    return changes


def guess(sequence: object, most: int) -> list[int]:
    """A drafter that is right now and then: it knows the model, and errs at every third token."""
    tokens = list(sequence.token_ids)
    for _ in range(most):
        wanted = answer_alone(tokens, SamplingParams(max_tokens=1, ignore_eos=True), len(tokens) + 1)[0]
        tokens.append(wanted if len(tokens) % 3 else (wanted + 1) % 50)
    return tokens[len(tokens) - most :] if most else []


@dataclasses.dataclass
class Fuzz:
    """One random life. ``step()`` does something; ``drain()`` lets everything finish and checks what came of it."""

    seed: int
    make: Callable[..., Driver] = driver

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.changes = random_changes(self.rng)
        depth = self.rng.randint(0, 2)
        drafter = guess if self.rng.random() < 0.15 and "sliding_window" not in self.changes else None
        self.driver = self.make(depth, drafter=drafter, **self.changes)
        self.limits: SchedulerLimits = self.driver.scheduler.limits
        self.wanted: dict[str, list[int]] = {}
        self.foresees = drafter is None and random.Random(f"foresees {self.seed}").random() < 0.3
        self.aborted: set[str] = set()
        self.num_added = 0
        self.num_steps = 0
        self.busy = self.rng.choice((0.1, 0.3, 0.6))

    def run(self, num_steps: int) -> None:
        """So many steps of the scheduler, then to the end."""
        while self.num_steps < num_steps:
            self.step()
        self.drain()

    def step(self) -> None:
        d, rng = self.driver, self.rng
        if rng.random() < self.busy and len(self.wanted) - len(d.finished) < 12:
            self.arrive()
        live = [name for name in self.wanted if name not in d.finished and name not in self.aborted]
        chance = rng.random()
        if live and chance < 0.03:
            self.abort(rng.choice(live))
        elif live and chance < 0.06:
            self.fork(rng.choice(live))
        elif chance < 0.065:
            self.pin()
        elif chance < 0.07:
            d.scheduler.prefixes.unpin()
        elif chance < 0.075:
            d.scheduler.prefixes.reset()
        elif d.in_flight and chance < 0.2:
            d.commit()
        if d.in_flight or d.scheduler.has_requests:
            plan = d.step()
            if plan is not None and rng.random() < 0.5:
                d.scheduler.observe(plan, 1e-3 + 1e-4 * plan.num_tokens * rng.random())
        self.num_steps += 1

    def arrive(self) -> None:
        rng = self.rng
        count = rng.choice((1, 1, 1, 2, 3))
        family, length = rng.randint(0, 2), rng.randint(1, MAX_MODEL_LEN - 1)
        prompt = [(5 * family + i) % 50 for i in range(length)]
        requests = [self.request(prompt) for _ in range(count)]
        try:
            if count > 1:
                self.driver.scheduler.add_choices(requests)
            else:
                self.driver.scheduler.add(requests[0])
        except RequestError as error:
            assert error.param == "n" and count > self.limits.max_num_seqs
            return
        for request in requests:
            self.expect(request)

    def request(self, prompt: list[int]) -> Request:
        rng = self.rng
        room = MAX_MODEL_LEN - len(prompt)
        most = rng.choice((None, 1, 2, 5, 16))
        sampling = SamplingParams(
            max_tokens=None if most is None else min(most, room),
            ignore_eos=rng.random() < 0.5,
            stop_token_ids=tuple(rng.sample(range(50), rng.randint(0, 2))),
        )
        self.num_added += 1
        return Request(
            request_id=str(self.num_added),
            prompt_token_ids=prompt,
            sampling=sampling,
            arrival_s=float(self.num_steps),
            priority=rng.randint(-1, 2),
            tenant=rng.choice("abc"),
            ttft_deadline_s=rng.choice((None, 1.0, 50.0)),
            cache_salt=rng.choice(("", "", "", "theirs")),
        )

    def expect(self, request: Request) -> None:
        self.driver.answers[request.request_id] = []
        self.wanted[request.request_id] = answer_alone(
            request.prompt_token_ids,
            request.sampling,
            MAX_MODEL_LEN,
            self.limits.sliding_window,
            request.cache_salt,
        )
        if self.foresees:
            self.driver.foresight[request.request_id] = self.wanted[request.request_id]

    def fork(self, name: str) -> None:
        parent = self.driver.scheduler.roster.find(name)
        if parent is not None and len(parent.token_ids) < MAX_MODEL_LEN:
            length = self.rng.randint(1, len(parent.token_ids))
            request = self.request([*parent.token_ids[:length]])
            self.driver.scheduler.add(request, parent_id=name)
            self.expect(request)

    def abort(self, name: str) -> None:
        self.driver.scheduler.finish(name, FinishReason.ABORT)
        self.aborted.add(name)
        self.driver.scheduler.check()

    def pin(self) -> None:
        try:
            self.driver.scheduler.prefixes.pin([(5 * self.rng.randint(0, 2) + i) % 50 for i in range(8)])
        except RequestError as error:
            assert error.param == "token_ids"

    def drain(self) -> None:
        """Everything that is left finishes within a bound, is right, and leaves nothing behind."""
        d = self.driver
        live = len(self.wanted) - len(d.finished) - len(self.aborted - d.finished.keys())
        d.run(max_steps=200 + live * 40 * MAX_MODEL_LEN)
        for name, wanted in self.wanted.items():
            if name in d.finished:
                assert d.answers[name] == wanted, f"request {name}"
                ended = wanted[-1] in d.finished[name].sequence.end_ids
                assert d.finished[name].finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
            else:
                assert name in self.aborted, f"request {name} got no end"
                assert d.answers[name] == wanted[: len(d.answers[name])]
        d.scheduler.prefixes.unpin()
        assert d.scheduler.num_live_pages == 0
        assert d.scheduler.host.num_used == d.scheduler.host.num_freed
        self.wanted.clear()
        self.aborted.clear()
        d.finished.clear()
        d.answers.clear()
        d.plans.clear()


def fuzz_or_none(seed: int) -> Fuzz | None:
    """None where the random limits contradict each other."""
    try:
        return Fuzz(seed)
    except ConfigError:
        return None
