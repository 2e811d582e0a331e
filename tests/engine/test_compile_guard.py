import logging

import jax
import numpy as np
import pytest

from jaxcb.engine.compile_guard import VARIABLE, CompileGuard
from jaxcb.errors import ConfigError
from jaxcb.request import SamplingParams
from tests.engine.conftest import MakeEngine
from tests.engine.run import complete


def compile_for_shapes(*shapes: int) -> None:
    @jax.jit
    def doubled(numbers):
        return numbers * 2

    for shape in shapes:
        doubled(np.ones(shape, np.float32))


def test_a_compilation_while_serving_is_counted_and_logged_with_the_argument_that_changed(
    make_engine: MakeEngine, monkeypatch, caplog
):
    monkeypatch.setenv(VARIABLE, "log")
    engine = make_engine()
    complete(engine, [(1, 2, 3)], SamplingParams(max_tokens=2))
    assert engine.stats().compiles == 0
    with caplog.at_level(logging.WARNING):
        engine._inbox.call(lambda: compile_for_shapes(3, 4))
    assert engine.stats().compiles == 2
    assert "jit(doubled) was compiled while the engine serves" in caplog.text
    assert "numbers, now f32[4] and before f32[3]" in caplog.text
    assert complete(engine, [(1, 2, 3)], SamplingParams(max_tokens=2))[0].finished


def test_in_tests_a_compilation_while_serving_raises(make_engine: MakeEngine, monkeypatch):
    monkeypatch.setenv(VARIABLE, "raise")
    engine = make_engine()
    with pytest.raises(RuntimeError, match="was compiled while the engine serves"):
        engine._inbox.call(lambda: compile_for_shapes(5))


def test_other_threads_may_compile(make_engine: MakeEngine):
    engine = make_engine()
    compile_for_shapes(6)
    assert engine.stats().compiles == 0


def test_an_unknown_mode_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "shout")
    with pytest.raises(ConfigError, match="JAXCB_COMPILE_GUARD must be log, raise or unset, got 'shout'"):
        CompileGuard()
