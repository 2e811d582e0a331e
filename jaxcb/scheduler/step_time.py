"""StepTimeFit: how long a step takes on this machine, learned from the last steps.

seconds = fixed + per_token * tokens + per_context * context tokens, by least squares with forgetting. The host's view
of a step is coarse, so the model is too; ``jaxcb.sim`` has one from a machine's data sheet.
"""

from __future__ import annotations

import math

Row = tuple[float, float, float]


class StepTimeFit:
    """Forgets with a half life of some 70 steps."""

    FORGETTING = 0.99
    MIN_STEPS = 8
    MAX_EXTRAPOLATION = 2.0
    """A step is never predicted for more than so many times the tokens of the largest one seen."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._largest = 0.0
        self._squares = [[0.0] * 3 for _ in range(3)]
        self._products = [0.0] * 3
        self._coefficients: Row | None = None
        self._mean_square_error = 0.0

    @property
    def fitted(self) -> bool:
        return self.num_steps >= self.MIN_STEPS

    def observe(self, num_tokens: int, num_context: int, seconds: float) -> None:
        """A step of so many tokens, that read the KV of so many positions, took so long."""
        if self.fitted:
            error = seconds - self.seconds(num_tokens, num_context)
            self._mean_square_error += 0.1 * (error * error - self._mean_square_error)
        row = (1.0, float(num_tokens), num_context / 1e3)
        for i in range(3):
            for j in range(3):
                self._squares[i][j] = self.FORGETTING * self._squares[i][j] + row[i] * row[j]
            self._products[i] = self.FORGETTING * self._products[i] + row[i] * seconds
        self._largest = max(self._largest * self.FORGETTING, num_tokens)
        self.num_steps += 1
        self._coefficients = None

    def seconds(self, num_tokens: int, num_context: int) -> float:
        """Predicted time of a step."""
        fixed, per_token, per_context = self._solve()
        return fixed + per_token * num_tokens + per_context * num_context / 1e3

    def recompute_s(self, num_tokens: int, chunk: int) -> float:
        """Seconds that a prompt of so many tokens adds to steps, in chunks of at most ``chunk``: of its tokens, and of
        the KV that each chunk reads, which is all of the prompt up to its end."""
        _, per_token, per_context = self._solve()
        whole, rest = divmod(num_tokens, chunk)
        positions = chunk * whole * (whole + 1) // 2 + (num_tokens if rest else 0)
        return per_token * num_tokens + per_context * positions / 1e3

    def tokens_within(self, seconds: float, num_context: int) -> float:
        """Tokens of the largest step that takes ``seconds``, with two standard errors kept back. May be negative."""
        margin = min(2 * math.sqrt(self._mean_square_error), seconds / 2)
        fixed, per_token, per_context = self._solve()
        room = seconds - margin - fixed - per_context * num_context / 1e3
        tokens = room / per_token if per_token > 0 else math.copysign(math.inf, room)
        return min(tokens, self.MAX_EXTRAPOLATION * self._largest)

    def _solve(self) -> Row:
        """Normal equations by elimination; a coefficient that comes out negative is taken as 0."""
        if self._coefficients is None:
            a = [[*row, product] for row, product in zip(self._squares, self._products, strict=True)]
            for i in range(3):
                a[i][i] += 1e-6 * a[i][i] + 1e-12  # steps that are all alike leave the split open
            for i in range(3):
                for j in range(i + 1, 3):
                    factor = a[j][i] / a[i][i]
                    a[j] = [x - factor * y for x, y in zip(a[j], a[i], strict=True)]
            solution = [0.0] * 3
            for i in reversed(range(3)):
                known = sum(a[i][j] * solution[j] for j in range(i + 1, 3))
                solution[i] = max((a[i][3] - known) / a[i][i], 0.0)
            self._coefficients = (solution[0], solution[1], solution[2])
        return self._coefficients
