"""A run drawn as text: a row a request, a column a step, P where a chunk of its prompt runs, d where it decodes.

Three requests, at most two of them running, budget 16. The last chunk of a prompt yields the answer's first token:

    step    1.....
    0 20+4  PPddd
    1 3+2   .Pd        (it waited: the first chunk of request 0 filled the budget)
    2 2+3      Pdd
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from jaxcb.scheduler import Row, StepPlan
from jaxcb.sim.result import RequestRecord

CHUNK, DECODE, WAITING, ABSENT = "P", "d", ".", " "
_TICK = 10


class Timeline:
    """Collects plans (pass :meth:`add` as ``on_plan``), up to ``max_steps``; the rest is only counted."""

    def __init__(self, max_steps: int):
        self.max_steps = max_steps
        self.num_steps = 0
        self._starts_s: list[float] = []
        self._cells: dict[int, dict[int, str]] = {}  # request -> step -> letter

    def add(self, plan: StepPlan, start_s: float, _step_s: float) -> None:
        """Note a step that starts at ``start_s``."""
        if self.num_steps < self.max_steps:
            for row in plan.rows:
                self._cells.setdefault(int(row.sequence.request.request_id), {})[self.num_steps] = _letter(row)
            self._starts_s.append(start_s)
        self.num_steps += 1

    @property
    def num_columns(self) -> int:
        """Steps that are drawn."""
        return len(self._starts_s)

    def lines(self, records: Seq[RequestRecord]) -> list[tuple[str, str]]:
        """Label and cells of each request that any of the steps computes."""
        return [
            (_label(number, records[number]), self._line(number, records[number])) for number in sorted(self._cells)
        ]

    def text(self, records: Seq[RequestRecord]) -> str:
        """The picture. Requests that none of its steps computes are left out."""
        rows = self.lines(records)
        width = max([len("step"), *(len(label) for label, _ in rows)]) + 2
        lines = ["step".ljust(width) + self._ruler()]
        lines += [label.ljust(width) + cells for label, cells in rows]
        if hidden := self.num_steps - self.num_columns:
            lines.append(f"and {hidden:,} more steps")
        return "\n".join(lines)

    def _ruler(self) -> str:
        """Step numbers, counted from 1, over every tenth column: ``1........10........20``."""
        ruler = ["."] * len(self._starts_s)
        for step in (0, *range(_TICK - 1, len(ruler), _TICK)):
            ruler[step : step + len(str(step + 1))] = str(step + 1)
        return "".join(ruler)[: len(self._starts_s)]

    def _line(self, number: int, record: RequestRecord) -> str:
        cells = self._cells[number]
        last = max(cells)
        return "".join(
            cells.get(step) or (WAITING if record.arrival_s <= start_s and step < last else ABSENT)
            for step, start_s in enumerate(self._starts_s)
        ).rstrip()


def _letter(row: Row) -> str:
    """A decode computes one token of the answer; everything else computes (or computes again) a chunk."""
    return DECODE if row.num_tokens == 1 and row.start >= row.sequence.num_prompt_tokens else CHUNK


def _label(number: int, record: RequestRecord) -> str:
    return f"{number} {record.num_prompt_tokens}+{record.num_output_tokens}"
