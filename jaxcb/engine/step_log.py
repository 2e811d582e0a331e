"""StepLog: a line of JSON for every step that ran, so that a step-time model can be fitted to this machine.

The first line describes the model and the compiled shapes; each other line is one step:

    {"weight_bytes": 269e6, "flops_per_token": 269e6, ..., "decode_sizes": [1, 2, 4], "mixed_sizes": [64, 128]}
    {"step": 0, "tokens": 40, "padded_tokens": 64, "decode_rows": 8, "kv_tokens": 903, "pairs": 2210, "wall_ms": 12.3}

``kv_tokens`` is the sum of the rows' contexts, ``pairs`` the queries times the positions they attend to (see
:class:`jaxcb.scheduler.load.StepLoad`). ``padded_tokens`` are those that the device computes; without compiled sizes in
the first line they are ``tokens``. ``wall_ms`` is the time that the step took of the loop: from the end of the step
before it, or from its own planning if the engine had been idle, to the moment its tokens were on the host.
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxcb.errors import ConfigError
from jaxcb.models import ModelSpec
from jaxcb.scheduler import load_of
from jaxcb.step.buckets import Buckets
from jaxcb.step.runner import InFlight


class StepLog:
    """Writes to ``file`` as the loop goes; a line is buffered until :meth:`close` or until a few KiB have gathered.

    ``itemsize``: bytes of a weight. ``padding_costs``: the device computes the padding of a compiled shape, which the
    native CPU kernels don't.

    Raises:
        ConfigError: the file can't be written.
    """

    def __init__(
        self,
        file: Path,
        spec: ModelSpec,
        buckets: Buckets,
        itemsize: int,
        *,
        kv_bytes_per_token: int,
        padding_costs: bool,
    ):
        try:
            self._out = file.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"step_log: can't write {file}: {error}", param="step_log") from error
        self._end_s: float | None = None  # None: the engine is idle
        self._starts_s: dict[int, float] = {}
        self._padding_costs = padding_costs
        shapes = list(buckets) if padding_costs else []
        self._write(
            {
                "weight_bytes": spec.num_params * itemsize,
                "flops_per_token": 2 * spec.num_active_params,
                "kv_bytes_per_token": kv_bytes_per_token,
                "attention_flops_per_pair": 4 * spec.num_layers * spec.q_size,
                "decode_sizes": [bucket.num_tokens for bucket in shapes if bucket.decode_only],
                "mixed_sizes": [bucket.num_tokens for bucket in shapes if not bucket.decode_only],
            }
        )

    def launched(self, step: int, planned_s: float) -> None:
        """Note that a step was launched; ``planned_s`` is when its planning began, on ``time.perf_counter``."""
        self._starts_s[step] = planned_s

    def done(self, step: InFlight, ended_s: float, *, more: bool) -> None:
        """Note that a step's tokens were on the host at ``ended_s``; ``more``: work is left, so the next step follows
        on this one and not on a pause."""
        plan, load = step.plan, load_of(step.plan)
        start_s = self._starts_s.pop(plan.step)
        if self._end_s is not None:
            start_s = self._end_s
        self._end_s = ended_s if more else None
        self._write(
            {
                "step": plan.step,
                "tokens": load.num_tokens,
                "padded_tokens": step.bucket.num_tokens if self._padding_costs else load.num_tokens,
                "decode_rows": plan.num_decodes,
                "kv_tokens": load.kv_tokens,
                "pairs": load.num_pairs,
                "wall_ms": round((ended_s - start_s) * 1e3, 4),
            }
        )

    def close(self) -> None:
        """Write what is buffered."""
        self._out.close()

    def _write(self, record: dict[str, object]) -> None:
        self._out.write(json.dumps(record) + "\n")
