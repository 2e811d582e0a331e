import jax
import pytest

from jaxcb.devices import placement_of
from jaxcb.errors import ConfigError
from tests.parallel.process import on_devices


def test_engines_run_beside_each_other_on_devices_of_their_own():
    found = on_devices(2, "beside")
    assert found["places"] == [[0], [1]]
    first, *others = found["answers"]
    assert all(answers == first for answers in others)
    assert found["handed_over"] == 144, "nine full pages, once"


def test_more_devices_than_there_are_are_refused_with_what_to_do():
    count = len(jax.local_devices()) + 1
    with pytest.raises(ConfigError, match=f"needs {count} devices, jax has {count - 1} .*JAX_NUM_CPU_DEVICES={count}"):
        placement_of(None, count)


def test_devices_that_are_given_must_be_as_many_as_are_asked_for():
    device = jax.local_devices()[0]
    assert placement_of([device], 1).devices == (device,)
    for devices, count in (([device, device], 2), ([device], 2), ([], 1)):
        with pytest.raises(ConfigError, match=f"devices must name {count}"):
            placement_of(devices, count)
