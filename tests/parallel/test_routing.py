"""Devices of several hosts agree on the experts of a token, however their routers round."""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.devices import AXIS, Placement
from jaxcb.models import decoder, fused
from jaxcb.models.experts import expert_product, expert_scores
from jaxcb.models.parallel import TensorParallel
from tests.parallel.cut import MIXTURE

SPEC = dataclasses.replace(MIXTURE, hidden_size=16, intermediate_size=16, num_experts=4, num_experts_per_token=2)
E, F, X = SPEC.hidden_size, SPEC.intermediate_size, SPEC.num_experts
PARALLEL = TensorParallel(2, expert_parallel=True)
RANDOM = np.random.default_rng(5)
STREAM, GATE_UP, DOWN = (
    jnp.asarray(RANDOM.normal(size=shape), jnp.float32) for shape in ((6, E), (X, 2 * F, E), (X, E, F))
)
ROUTERS = jnp.asarray(RANDOM.normal(size=(2, X, E)), jnp.float32)
"""Of two devices: these don't differ in a last bit alone."""
SAME = jnp.stack([ROUTERS[0]] * 2)


def by_decoder(parallel: TensorParallel, router: Any, gate_up: Any, down: Any) -> Any:
    parts = object.__new__(decoder.RolledLayer)
    vars(parts).update(
        o=lambda x: x,
        post_norm=lambda x: x,
        router=lambda x: expert_scores(x, router),
        gate_up=lambda x, starts, rows: expert_product(x, gate_up, starts, rows),
        down=lambda x, starts: expert_product(x, down, starts),
    )
    return decoder._mix(SPEC, parts, parallel, STREAM, jnp.zeros_like(STREAM))


def by_fused(parallel: TensorParallel, router: Any, gate_up: Any, down: Any) -> Any:
    places: Any = types.SimpleNamespace(pages=jnp.ones(len(STREAM), jnp.int32))
    layer = fused._Layer(SPEC, places, (), None, True, False, parallel)  # type: ignore[arg-type]  # it attends to nothing
    parts = {"router": router, "gate_up": gate_up, "down": down}
    return parallel.sum(layer._experts({name: {"kernel": kernel} for name, kernel in parts.items()}, STREAM))


@pytest.mark.parametrize("decoder_of", [by_decoder, by_fused])
def test_every_device_takes_the_experts_that_the_first_has_chosen(decoder_of):
    def on_both(parallel: TensorParallel) -> Any:
        """Each device has two of the experts."""
        return jax.jit(jax.vmap(functools.partial(decoder_of, parallel), axis_name=AXIS))

    halves = [jnp.reshape(kernel, (2, X // 2, *kernel.shape[1:])) for kernel in (GATE_UP, DOWN)]
    alike, agreed = on_both(PARALLEL), on_both(dataclasses.replace(PARALLEL, apart=True))
    wanted = alike(SAME, *halves)
    assert not np.allclose(alike(ROUTERS, *halves), wanted), "else nothing is tested"
    np.testing.assert_array_equal(agreed(ROUTERS, *halves), wanted)


@pytest.mark.parametrize(("processes", "here"), [((0, 0), True), ((0, 1), False)])
def test_devices_of_another_host_are_known(processes, here):
    devices = [types.SimpleNamespace(process_index=index) for index in processes]
    assert Placement(tuple(devices)).is_here is here  # type: ignore[arg-type]  # they are only counted
