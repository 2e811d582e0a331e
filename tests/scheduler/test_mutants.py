"""Tests of the tests: each seeded bug must be caught by the random lives."""

import pytest

from tests.scheduler.fuzz import fuzz_or_none
from tests.scheduler.mutants import MUTANTS


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_seeded_bug_is_caught(mutant):
    with mutant(), pytest.raises((AssertionError, RuntimeError, LookupError)):
        for seed in range(100):
            fuzz = fuzz_or_none(seed)
            if fuzz is not None:
                fuzz.run(100)
