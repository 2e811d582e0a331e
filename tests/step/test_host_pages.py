"""Pages in host memory: what is put comes back, whatever the kind of memory, and the programs compile for a GPU."""

from __future__ import annotations

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxcb.step import host_pages
from jaxcb.step.host_pages import HOST_MEMORY, MAX_LEAVING, SIZES, HostPages
from pallas_kernels import gather_pages, scatter_pages
from pallas_kernels.deviceless import environment

SHAPE = (2, 2, 8, 2, 4)


def pages_and_host(num_pages: int, memory: str | None) -> tuple[jax.Array, HostPages]:
    device = SingleDeviceSharding(jax.devices()[0])
    shape = (num_pages + 1, *SHAPE)
    kv = jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), device)
    page = jax.ShapeDtypeStruct((1, *SHAPE), kv.dtype, sharding=device)
    abstract = jax.ShapeDtypeStruct(kv.shape, kv.dtype, sharding=device)
    host = HostPages(abstract, page, gather_pages, scatter_pages, memory=memory)
    for job in host.jobs(device):
        job.keep(job.lower().compile())
    return kv, host


@pytest.mark.parametrize("memory", [None, HOST_MEMORY])
@pytest.mark.parametrize("count", [1, SIZES[0], SIZES[0] + 1, 2 * SIZES[-1] + 3])
def test_what_is_put_comes_back_elsewhere_bit_by_bit(memory, count):
    kv, host = pages_and_host(2 * count, memory)
    before = np.array(kv)
    host.put(kv, [(page, 500 - page) for page in range(1, count + 1)])
    kv = jnp.zeros_like(kv)  # what the pages held is gone
    after = np.asarray(host.get(kv, [(500 - page, page + count) for page in range(1, count + 1)]))
    assert (after[count + 1 :] == before[1 : count + 1]).all()
    assert (after[1 : count + 1] == 0).all()


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
def test_pages_lie_in_pinned_memory_where_the_device_has_memory_of_its_own(kind, monkeypatch):
    monkeypatch.setattr(host_pages, "platform", lambda: kind)
    kv, host = pages_and_host(3, None)
    host.put(kv, [(1, 7), (2, 8)])
    kinds = {page.sharding.memory_kind for page in host._pages.values()}
    assert kinds == {HOST_MEMORY if kind == "gpu" else kv.sharding.memory_kind}


def test_only_so_many_calls_are_under_way_and_a_number_used_again_holds_the_last():
    kv, host = pages_and_host(3, HOST_MEMORY)
    for page in (1, 2, 3) * MAX_LEAVING:
        host.put(kv, [(page, 9)])
    assert len(host._leaving) == MAX_LEAVING and len(host._pages) == 1
    before = np.array(kv)
    assert (np.asarray(host.get(kv, [(9, 1)]))[1] == before[3]).all()


_COMPILE = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxcb.step import host_pages
from jaxcb.step.host_pages import HostPages
from pallas_kernels import gather_pages, scatter_pages
from pallas_kernels.deviceless import target_mesh
with target_mesh("h200") as mesh:
    whole = NamedSharding(mesh, PartitionSpec())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
    kv, page = array(1001, 32, 2, 16, 8, 128), array(1, 32, 2, 16, 8, 128)
    host = HostPages(kv, page, gather_pages, scatter_pages)
    for job in host.jobs(whole):
        compiled = job.lower().compile()
        memory = compiled.memory_analysis()
        print(job.name, memory.temp_size_in_bytes, memory.alias_size_in_bytes, memory.output_size_in_bytes)
"""
_PAGE_BYTES = 32 * 2 * 16 * 8 * 128 * 2


@pytest.mark.slow
@pytest.mark.network
def test_the_programs_compile_for_an_h200_and_copy_no_more_than_the_pages_they_move(plugin):
    """The copies between the two memories need no program: jax has the DMA engine do them."""
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE], env=environment(plugin), capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("pages ")]
    assert [(line[1], int(line[2])) for line in lines] == [(way, size) for size in SIZES for way in ("out", "in")]
    for _, way, size, temporary, aliased, output in lines:
        moved = int(size) * _PAGE_BYTES
        assert int(temporary) <= moved + 4096
        if way == "in":
            assert int(aliased) >= 1001 * _PAGE_BYTES, "the pool is written in place"
        else:
            assert moved <= int(output) <= moved + 4096
