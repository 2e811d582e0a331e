"""Deterministic replay: what happened to a scheduler, as JSON lines, and the same plans from it again.

The scheduler reads no clock and draws no random number, so its calls and their arguments say everything. A log that an
engine recorded (``EngineConfig(event_log="FILE")``) is all that a bug report needs:

    python -m jaxcb.scheduler.replay FILE

Lines, in the order of the calls: the limits first; then ``add``, ``finish``, ``plan`` (with a checksum of the rows, or
null), ``commit`` and so on. Prompts are in it as token ids.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import zlib
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, TextIO

from jaxcb.errors import JaxcbError, RequestError
from jaxcb.paging import PageMoves, PrefixCache
from jaxcb.request import FinishReason, Request, SamplingParams
from jaxcb.scheduler.handover import Handover
from jaxcb.scheduler.knobs import SchedulerLimits
from jaxcb.scheduler.memory import SequenceMemory
from jaxcb.scheduler.plan import Sampled, StepPlan, StepTokens, TokenEvent
from jaxcb.scheduler.policy import Key
from jaxcb.scheduler.prefixes import Prefixes
from jaxcb.scheduler.roster import Roster
from jaxcb.scheduler.scheduler import Scheduler
from jaxcb.scheduler.sequence import Sequence

_FUNCTION = "function "
"""Before the name of one, in a log."""


class ReplayError(JaxcbError):
    """A log can't be read, or another plan came of it than was recorded."""


class RecordingScheduler(Scheduler):
    """A scheduler that writes down every call. ``file`` is flushed after each, since a log is most wanted after a
    crash."""

    def __init__(self, limits: SchedulerLimits, eos_token_ids: Seq[int] = (), *, file: TextIO):
        super().__init__(limits, eos_token_ids)
        self._file = file
        values = {name: _plain(value) for name, value in dataclasses.asdict(limits).items()}
        self._write({"limits": values, "eos_token_ids": sorted(eos_token_ids)})
        self.prefixes = _RecordingPrefixes(limits, self.cache, self._write)
        self.handover = _RecordingHandover(limits, self._memory, self.roster, self._write)

    def add(self, request: Request, *, parent_id: str | None = None) -> Sequence:
        self._write({"add": _of_request(request), "parent_id": parent_id})
        return super().add(request, parent_id=parent_id)

    def add_choices(self, requests: Seq[Request]) -> list[Sequence]:
        self._write({"add_choices": [_of_request(request) for request in requests]})
        return super().add_choices(requests)

    def finish(self, request_id: str, reason: FinishReason) -> Sequence | None:
        self._write({"finish": request_id, "reason": reason.value})
        return super().finish(request_id, reason)

    def foresee(self, sequence: Sequence, token_ids: Seq[int]) -> None:
        self._write({"foresee": sequence.request.request_id, "token_ids": list(token_ids)})
        super().foresee(sequence, token_ids)

    def restart_all(self) -> None:
        self._write({"restart_all": None})
        prefixes, self.prefixes = self.prefixes, Prefixes(self.limits, self.cache)  # one line says it all
        assert not self.handover.expected, "the engine takes over what is expected before"
        super().restart_all()
        self.prefixes = prefixes

    def plan(self) -> StepPlan | None:
        plan = super().plan()
        self._write({"plan": checksum(plan)})
        return plan

    def commit(self, plan: StepPlan, sampled: Seq[Sampled]) -> StepTokens:
        self._write({"commit": plan.step, "sampled": list(sampled)})
        return super().commit(plan, sampled)

    def take_moves(self) -> PageMoves | None:
        self._write({"take_moves": None})
        return super().take_moves()

    def observe(self, plan: StepPlan, seconds: float) -> None:
        self._write({"observe": plan.step, "seconds": seconds})
        super().observe(plan, seconds)

    def set_host_page_s(self, seconds: float) -> None:
        self._write({"host_page_s": seconds})
        super().set_host_page_s(seconds)

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._file.flush()


class _RecordingPrefixes(Prefixes):
    def __init__(self, limits: SchedulerLimits, cache: PrefixCache, write: Callable[[dict[str, Any]], None]):
        super().__init__(limits, cache)
        self._write = write

    def pin(self, token_ids: Seq[int], cache_salt: str = "") -> int:
        self._write({"pin_prefix": list(token_ids), "cache_salt": cache_salt})
        return super().pin(token_ids, cache_salt)

    def unpin(self) -> None:
        self._write({"unpin_prefixes": None})
        super().unpin()

    def reset(self) -> None:
        self._write({"reset_prefixes": None})
        super().reset()

    def place(self, token_ids: Seq[int], cache_salt: str = "") -> list[tuple[int, int]]:
        self._write({"place_prefix": list(token_ids), "cache_salt": cache_salt})
        return super().place(token_ids, cache_salt)


class _RecordingHandover(Handover):
    def __init__(
        self,
        limits: SchedulerLimits,
        memory: SequenceMemory,
        roster: Roster,
        write: Callable[[dict[str, Any]], None],
    ):
        super().__init__(limits, memory, roster)
        self._write = write

    def expect(self, requests: Seq[Request]) -> list[Sequence]:
        self._write({"expect": [_of_request(request) for request in requests]})
        return super().expect(requests)

    def reserve(self, sequence: Sequence) -> int | None:
        self._write({"reserve": sequence.request.request_id})
        return super().reserve(sequence)

    def first_token(self, sequence: Sequence, token_id: int, num_cached_tokens: int) -> TokenEvent:
        self._write({"first_token": sequence.request.request_id, "token_id": token_id, "cached": num_cached_tokens})
        return super().first_token(sequence, token_id, num_cached_tokens)

    def adopt(self, sequence: Sequence) -> None:
        self._write({"adopt": sequence.request.request_id})
        super().adopt(sequence)

    def take_over(self, sequence: Sequence) -> None:
        self._write({"take_over": sequence.request.request_id})
        super().take_over(sequence)

    def lend(self, request_id: str, pages: Seq[int]) -> None:
        self._write({"lend": request_id, "pages": list(pages)})
        super().lend(request_id, pages)

    def returned(self, request_id: str) -> None:
        self._write({"returned": request_id})
        super().returned(request_id)


def checksum(plan: StepPlan | None) -> int | None:
    """Of everything that the device is told."""
    if plan is None:
        return None
    rows = [
        (row.sequence.request.request_id, row.slot, row.start, list(row.token_ids), row.first_new_page, row.new_pages)
        for row in plan.rows
    ]
    return zlib.crc32(repr((plan.step, plan.num_decodes, rows, plan.moves)).encode())


def replay(lines: Iterable[str], *, policy: Key | None = None) -> list[StepPlan]:
    """Do again what a log says.

    Arguments:
        lines: of the log.
        policy: the key function that the log's scheduler had, if it had one of the user's own.

    Returns:
        Every plan.

    Raises:
        ReplayError: a line can't be read, or a plan differs from the recorded one; the message names the line.
    """
    plans: list[StepPlan] = []
    scheduler: Scheduler | None = None
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
            if scheduler is None:
                scheduler = _start(event, policy)
                continue
            kind = next(iter(event))
            _CALLS[kind](scheduler, event, plans)
        except RequestError:
            continue  # the recorded call was refused too
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            raise ReplayError(f"line {number} is not of a scheduler's log: {type(error).__name__}: {error}") from error
        except _OtherPlanError as error:
            raise ReplayError(f"line {number}: {error}") from error
    return plans


class _OtherPlanError(Exception):
    pass


def _plan(scheduler: Scheduler, event: dict[str, Any], plans: list[StepPlan]) -> None:
    plan = scheduler.plan()
    if checksum(plan) != event["plan"]:
        raise _OtherPlanError(f"step {len(plans)} is planned otherwise than it was recorded")
    if plan is not None:
        plans.append(plan)


_CALLS: dict[str, Callable[[Scheduler, dict[str, Any], list[StepPlan]], object]] = {
    "plan": _plan,
    "add": lambda s, event, plans: s.add(_request(event["add"]), parent_id=event["parent_id"]),
    "add_choices": lambda s, event, plans: s.add_choices([_request(fields) for fields in event["add_choices"]]),
    "finish": lambda s, event, plans: s.finish(event["finish"], FinishReason(event["reason"])),
    "foresee": lambda s, event, plans: s.foresee(_found(s, event["foresee"]), event["token_ids"]),
    "restart_all": lambda s, event, plans: s.restart_all(),
    "pin_prefix": lambda s, event, plans: s.prefixes.pin(event["pin_prefix"], event["cache_salt"]),
    "unpin_prefixes": lambda s, event, plans: s.prefixes.unpin(),
    "reset_prefixes": lambda s, event, plans: s.prefixes.reset(),
    "place_prefix": lambda s, event, plans: s.prefixes.place(event["place_prefix"], event["cache_salt"]),
    "expect": lambda s, event, plans: s.handover.expect([_request(fields) for fields in event["expect"]]),
    "reserve": lambda s, event, plans: s.handover.reserve(_expected(s, event["reserve"])),
    "first_token": lambda s, event, plans: s.handover.first_token(
        _expected(s, event["first_token"]), event["token_id"], event["cached"]
    ),
    "adopt": lambda s, event, plans: s.handover.adopt(_expected(s, event["adopt"])),
    "take_over": lambda s, event, plans: s.handover.take_over(_expected(s, event["take_over"])),
    "lend": lambda s, event, plans: s.handover.lend(event["lend"], event["pages"]),
    "returned": lambda s, event, plans: s.handover.returned(event["returned"]),
    "take_moves": lambda s, event, plans: s.take_moves(),
    "host_page_s": lambda s, event, plans: s.set_host_page_s(event["host_page_s"]),
    "commit": lambda s, event, plans: s.commit(plans[event["commit"]], event["sampled"]),
    "observe": lambda s, event, plans: s.observe(plans[event["observe"]], event["seconds"]),
}


def _found(scheduler: Scheduler, request_id: str) -> Sequence:
    sequence = scheduler.roster.find(request_id) or scheduler.handover.expected.get(request_id)
    if sequence is None:
        raise LookupError(f"there is no request {request_id!r}")
    return sequence


def _expected(scheduler: Scheduler, request_id: str) -> Sequence:
    sequence = scheduler.handover.expected.get(request_id)
    if sequence is None:
        raise LookupError(f"no request {request_id!r} is expected")
    return sequence


def _start(event: dict[str, Any], policy: Key | None) -> Scheduler:
    values = dict(event["limits"], step_sizes=tuple(event["limits"]["step_sizes"]))
    if policy is not None:
        values["policy"] = policy
    elif values["policy"].startswith(_FUNCTION):
        raise ReplayError(
            f"the log was made under a policy that is a {values['policy']}, which a file can't hold: give it to "
            "jaxcb.scheduler.replay.replay(lines, policy=...)"
        )
    return Scheduler(SchedulerLimits(**values), event["eos_token_ids"])


def _of_request(request: Request) -> dict[str, Any]:
    """What the scheduler looks at: states of logits processors are arrays, and none of its business; nor are their
    arguments, which are left out where JSON can't say them."""
    sampling = request.sampling
    try:
        json.dumps(sampling.extra_args)
    except (TypeError, ValueError, RecursionError):
        sampling = dataclasses.replace(sampling, extra_args=None)
    deadline_s = request.ttft_deadline_s
    plain = dataclasses.replace(
        request,
        processor_states=(),
        sampling=sampling,
        arrival_s=float(request.arrival_s),  # numbers may be numpy's
        priority=float(request.priority),
        ttft_deadline_s=None if deadline_s is None else float(deadline_s),
    )
    return dataclasses.asdict(plain) | {"prompt_token_ids": list(request.prompt_token_ids)}


def _request(fields: dict[str, Any]) -> Request:
    return Request(**{**fields, "sampling": SamplingParams(**fields["sampling"])})


def _plain(value: Any) -> Any:
    """A function goes by its name, which replay can't call."""
    return f"{_FUNCTION}{getattr(value, '__qualname__', value)}" if callable(value) else value


def main(argv: Seq[str] | None = None) -> int:
    """Replay a log; status 1 if it can't be or a plan differs."""
    parser = argparse.ArgumentParser(prog="python -m jaxcb.scheduler.replay", description="Replay a scheduler's log.")
    parser.add_argument("file", type=Path)
    args = parser.parse_args(argv)
    try:
        with args.file.open(encoding="utf-8") as lines:
            plans = replay(lines)
    except (JaxcbError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{len(plans)} steps, {sum(plan.num_tokens for plan in plans)} tokens, planned as recorded")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
