"""Calibration: the rates of a step-time model from the step log of a real engine.

The model is a hinge in the number of tokens and a line in the rest:

    t = c + a * max(tokens, knee) + b * kv_tokens + d * pairs        all coefficients at least 0

so for each knee it is a non-negative least-squares problem, and the knee is searched among the token counts seen.
Reading the weights takes ``a * knee``. Tokens are counted with the padding of the step's bucket, which the device
computes too. What a log doesn't hold (no long contexts, no step past the knee) the fit can't know.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jaxcb.errors import ConfigError
from jaxcb.scheduler import StepLoad, StepPlan
from jaxcb.sim.step_time import StepTimeModel

MIN_STEPS = 8
"""Fewer say nothing about five coefficients."""
FIGURES = ("weight_bytes", "flops_per_token", "kv_bytes_per_token", "attention_flops_per_pair")


class StepRecord(NamedTuple):
    """One step that ran."""

    load: StepLoad
    """``num_tokens`` without padding."""
    padded_tokens: int
    wall_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepLogFile:
    """What ``--step-log`` wrote."""

    figures: dict[str, float]
    """Of the model: the fields of StepTimeModel that are no rates."""
    decode_sizes: tuple[int, ...]
    mixed_sizes: tuple[int, ...]
    """Compiled token counts of steps that only decode, and of others; a step runs in the next larger one."""
    steps: list[StepRecord]

    def padded(self, plan: StepPlan) -> int:
        """Tokens that the device computes for a plan."""
        return padded_tokens(plan.num_tokens, self.decode_sizes if plan.decode_only else self.mixed_sizes)


def padded_tokens(num_tokens: int, sizes: tuple[int, ...]) -> int:
    """The smallest of ``sizes`` that holds ``num_tokens``; without sizes, nothing is padded."""
    return min((size for size in sizes if size >= num_tokens), default=num_tokens)


def read_step_log(file: Path) -> StepLogFile:
    """
    Raises:
        ConfigError: the file can't be read or a line is malformed; the message names it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the step log {file}: {error}", param="step_log") from error
    if not lines:
        raise ConfigError(f"the step log {file} is empty", param="step_log")
    figures, decode_sizes, mixed_sizes = _parsed(file, 1, lines[0], _header)
    steps = [_parsed(file, number, line, _step) for number, line in enumerate(lines[1:], 2)]
    return StepLogFile(figures=figures, decode_sizes=decode_sizes, mixed_sizes=mixed_sizes, steps=steps)


def fit(log: StepLogFile) -> StepTimeModel:
    """The model whose times come closest, in least squares, to those of the log.

    Raises:
        ConfigError: there are fewer than ``MIN_STEPS`` steps.
    """
    if len(log.steps) < MIN_STEPS:
        raise ConfigError(
            f"a step log of {len(log.steps)} steps is too short to fit: at least {MIN_STEPS} are needed, and a few "
            "hundred of different sizes make it good",
            param="step_log",
        )
    tokens = np.array([step.padded_tokens for step in log.steps], float)
    kv_tokens = np.array([step.load.kv_tokens for step in log.steps], float)
    pairs = np.array([step.load.num_pairs for step in log.steps], float)
    wall_s = np.array([step.wall_s for step in log.steps], float)

    def with_knee(knee: float) -> tuple[Float[np.ndarray, "4"], float]:
        columns = np.stack([np.ones_like(tokens), np.maximum(tokens, knee), kv_tokens, pairs], axis=1)
        return _non_negative(columns, wall_s)

    knee = _best_knee(np.unique([0.0, *tokens]).tolist(), lambda knee: with_knee(knee)[1])
    return _model(log.figures, knee, with_knee(knee)[0])


def _best_knee(sizes: list[float], residual: Callable[[float], float]) -> float:
    """The best of the sizes seen, or a better place between it and its neighbours. Of equals the smallest."""
    from scipy.optimize import minimize_scalar

    residuals = [residual(size) for size in sizes]
    best = min(range(len(sizes)), key=lambda i: residuals[i])
    low, high = sizes[max(best - 1, 0)], sizes[min(best + 1, len(sizes) - 1)]
    between = minimize_scalar(residual, bounds=(low, high), method="bounded", options={"xatol": 1e-6 * (high or 1.0)})
    return float(between.x) if between.fun < residuals[best] * (1 - 1e-6) else sizes[best]


def _model(figures: dict[str, float], knee: float, coefficients: Float[np.ndarray, "4"]) -> StepTimeModel:
    constant, per_token, per_kv_token, per_pair = coefficients.tolist()
    return StepTimeModel(
        **figures,
        bandwidth=_rate(figures["weight_bytes"], per_token * knee),
        flops=_rate(figures["flops_per_token"], per_token),
        kv_bandwidth=_rate(figures["kv_bytes_per_token"], per_kv_token),
        attention_flops=_rate(figures["attention_flops_per_pair"], per_pair),
        overhead_s=constant,
    )


def _non_negative(columns: Float[np.ndarray, "N 4"], wall_s: Float[np.ndarray, "N"]) -> tuple[Any, float]:
    from scipy.optimize import nnls

    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)  # the columns differ by orders of magnitude
    solution, residual = nnls(columns / scale, wall_s)
    return solution / scale, float(residual)


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else math.inf


def _parsed(file: Path, number: int, line: str, parse: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        return parse(json.loads(line))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{file}, line {number}: not a line of a step log ({type(error).__name__}: {error})", param="step_log"
        ) from error


def _header(record: dict[str, Any]) -> tuple[dict[str, float], tuple[int, ...], tuple[int, ...]]:
    figures = {name: float(record[name]) for name in FIGURES}
    return figures, tuple(sorted(record["decode_sizes"])), tuple(sorted(record["mixed_sizes"]))


def _step(record: dict[str, Any]) -> StepRecord:
    load = StepLoad(int(record["tokens"]), int(record["kv_tokens"]), int(record["pairs"]))
    return StepRecord(load, int(record["padded_tokens"]), float(record["wall_ms"]) / 1e3)
