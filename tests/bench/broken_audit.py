"""bench.audit_compile with a step that is broken on purpose; $BROKEN says how."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp

from bench import audit_compile
from jaxcb.step import program, runner

HOW = os.environ["BROKEN"]
jit, head_logits, kinds = jax.jit, program.head_logits, program.ragged_paged_attention


def undonated(function: Any, donate_argnums: Any = (), **options: Any) -> Any:
    return jit(function, **options)


def every_row(spec: Any, backend: Any, params: Any, hidden: Any, num_rows: Any, **options: Any) -> Any:
    rows = jnp.repeat(hidden, 2, 0)  # as if twice as many were sampled
    return head_logits(spec, backend, params, rows, num_rows, **options).astype(jnp.float32)


def in_a_loop(q: Any, *args: Any, **options: Any) -> Any:
    """Attention as many times as there are tokens: only the device knows."""
    times = jnp.sum(q[:, 0, 0] > 0)
    return jax.lax.fori_loop(0, times, lambda i, q: kinds(q, *args, **options), q)


if HOW == "undonated":
    runner.jax = type("jax", (), {**vars(jax), "jit": staticmethod(undonated)})  # type: ignore[attr-defined]
elif HOW == "logits":
    program.head_logits = every_row
elif HOW == "loop":
    program.ragged_paged_attention = functools.partial(in_a_loop)
else:
    raise SystemExit(f"BROKEN must be undonated, logits or loop, got {HOW}")

if __name__ == "__main__":
    audit_compile.main()
