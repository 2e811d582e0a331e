"""Weights that are given to an engine: where they lie they stay, and what it can't take is refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.config import EngineConfig
from jaxcb.devices import Placement, placement_of
from jaxcb.disagg.identity import fingerprint
from jaxcb.errors import ConfigError
from jaxcb.hosts.identity import Weights
from jaxcb.models.decoder import init_params
from jaxcb.models.parallel import part_of
from jaxcb.weights import placed as placed_module
from jaxcb.weights.held import held_params
from jaxcb.weights.loader import prepared
from jaxcb.weights.panels import in_panels
from jaxcb.weights.placed import placed
from tests.parallel.cut import CUT, MIXTURE

Params = dict[str, Any]


class Elsewhere(Placement):
    """Two devices of other hosts: what is put there is only shown to the witness."""

    own: Any = ()
    whole: Any = None


def elsewhere(**changes: Any) -> Placement:
    return Elsewhere((object(), object()), **changes)  # type: ignore[arg-type]  # nothing is put there


def parts_of(params: Params, *, expert_parallel: bool) -> Params:
    """As two devices have them."""

    def cut(path: Any, array: Any) -> Any:
        keys = tuple(key.key for key in path)
        parts = [part_of(keys, array, MIXTURE, 2, index, expert_parallel=expert_parallel) for index in range(2)]
        return array if parts[0] is None else np.stack(parts)

    return jax.tree.map_with_path(cut, params)


@pytest.fixture(scope="module")
def mixture() -> Params:
    return jax.tree.map(np.asarray, init_params(MIXTURE, jnp.float32))


@pytest.mark.parametrize("whole", [True, False])
def test_parts_of_experts_are_not_taken_for_whole_ones(mixture: Params, whole: bool):
    params = parts_of(mixture, expert_parallel=not whole)
    with pytest.raises(ConfigError, match=r"of 8 experts, and enable_expert_parallel .* takes") as error:
        placed(params, MIXTURE, elsewhere(expert_parallel=whole))
    assert error.value.param == "enable_expert_parallel"


def test_more_parts_than_devices_are_refused_with_their_number(mixture: Params):
    params = parts_of(mixture, expert_parallel=False)
    with pytest.raises(ConfigError, match="cut into 2 parts, and the engine has 1 devices") as error:
        placed(params, MIXTURE, placement_of(None, 1))
    assert error.value.param == "tensor_parallel_size"


def test_panels_can_not_be_cut_and_are_for_the_native_kernels():
    panels = in_panels(init_params(CUT, jnp.float32))
    with pytest.raises(ConfigError, match="can't be cut over 2 devices") as error:
        placed(panels, CUT, elsewhere())
    assert error.value.param == "tensor_parallel_size"
    there = placed(panels, CUT, placement_of(None, 1))
    for config, param in (
        (EngineConfig(backend="xla"), "backend"),
        (EngineConfig(backend="native", quantization="int8"), "quantization"),
    ):
        with pytest.raises(ConfigError, match=f"in panels for the native CPU kernels, and {param}") as error:
            prepared(there, CUT, config)
        assert error.value.param == param


def test_numpys_arrays_are_put_on_the_device():
    params = init_params(CUT, jnp.float32)
    there = placed(jax.tree.map(np.asarray, params), CUT, placement_of(None, 1))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(there))
    jax.tree.map(np.testing.assert_array_equal, there, params)
    assert placed(there, CUT, placement_of(None, 1)) is there


def changed(params: Params, path: Any, rows: slice = slice(None)) -> Params:
    """One parameter is another in these rows."""

    def change(own: Any, array: np.ndarray) -> np.ndarray:
        array = np.array(array)
        if own == path:
            array[rows] += 1
        return array

    return jax.tree.map_with_path(change, params)


@pytest.mark.parametrize("tied", [True, False])
def test_hosts_tell_other_weights_by_every_parameter(tied: bool, monkeypatch: pytest.MonkeyPatch):
    """Norms and routers, which every device has whole, too."""
    monkeypatch.setattr(placed_module, "on_device", lambda array, *_, **__: array)
    spec = dataclasses.replace(MIXTURE, num_layers=1, tie_word_embeddings=tied, qk_norm=True, windows=(None,))
    params = jax.tree.map(np.asarray, init_params(spec, jnp.float32))

    def digest(given: Params) -> str:
        witness = Weights()
        held_params(spec, given, elsewhere(witness=witness))
        return witness.digest()

    paths = [path for path, _ in jax.tree.leaves_with_path(params)]
    digests = {digest(params), *(digest(changed(params, path)) for path in paths)}
    assert len(digests) == 1 + len(paths) > 10


def test_a_fingerprint_knows_every_part_of_what_lies_in_one_array():
    """Values behind queries and keys, up behind gate, the last of the experts, the last of the layers."""
    spec = dataclasses.replace(MIXTURE, num_layers=6, windows=(None,) * 6)
    params = jax.tree.map(np.asarray, init_params(spec, jnp.float32))
    keys = {jax.tree_util.keystr(path): path for path, _ in jax.tree.leaves_with_path(params)}
    qkv, gate_up = keys["['layers'][0]['qkv']['kernel']"], keys["['layers'][0]['gate_up']['kernel']"]
    others = [
        changed(params, qkv, slice(spec.q_size + spec.kv_size, None)),
        changed(params, gate_up, np.s_[:, spec.intermediate_size :]),  # type: ignore[arg-type]  # of every expert
        changed(params, gate_up, slice(7, None)),
    ]
    last = changed(params, keys["['layers'][5]['o']['kernel']"])
    panels = [in_panels(jax.tree.map(jnp.asarray, each)) for each in (params, last)]
    assert len({fingerprint(each) for each in (params, *others, *panels)}) == 6
