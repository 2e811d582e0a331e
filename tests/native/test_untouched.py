from __future__ import annotations

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import native

pytestmark = pytest.mark.native


def resident_mib() -> int:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) // 1024


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_take_up_memory_as_they_are_written():
    make = jax.jit(lambda: native.untouched((256, 1 << 20), jnp.uint8)).lower().compile()
    fill = jax.jit(lambda pages: pages.at[:128].set(7), donate_argnums=0)
    fill = fill.lower(jax.ShapeDtypeStruct((256, 1 << 20), jnp.uint8)).compile()
    before = resident_mib()
    pages = make()
    pages.block_until_ready()
    assert resident_mib() - before < 32
    pages = fill(pages)
    pages.block_until_ready()
    assert 100 < resident_mib() - before < 200
    assert int(pages[:128].min()) == 7
