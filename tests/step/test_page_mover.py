import jax.numpy as jnp
import numpy as np
import pytest

from jaxcb.paging import PageMoves
from jaxcb.step.page_mover import PAGES_PER_MOVE, PageMover
from pallas_kernels.metadata import default_backend


def pages_and_mover(dtype, num_pages: int, num_host_pages: int):
    shape = (num_pages + 1, 2, 2, 8, 2, 4)
    kv = jnp.arange(np.prod(shape)).reshape(shape).astype(dtype)
    mover = PageMover(kv, num_host_pages, default_backend())
    for job in mover.jobs():
        job.keep(job.lower().compile())
    return kv, mover


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.uint16])
def test_out_then_in_then_copies(dtype):
    kv, mover = pages_and_mover(dtype, num_pages=7, num_host_pages=50)
    before = np.array(kv)
    moves = PageMoves(out=[(1, 7), (2, 50)], into=[(50, 4), (7, 5)], copies=[(4, 6)])
    after = np.asarray(mover.move(kv, moves))
    assert (after[4] == before[2]).all() and (after[5] == before[1]).all() and (after[6] == before[2]).all()
    assert (after[[1, 2, 3, 7]] == before[[1, 2, 3, 7]]).all()


def test_more_pages_than_one_call_moves_all_arrive():
    count = 3 * PAGES_PER_MOVE + 5
    kv, mover = pages_and_mover(jnp.float32, num_pages=2 * count, num_host_pages=count)
    before = np.array(kv)
    out = [(i, i) for i in range(1, count + 1)]
    kv = mover.move(kv, PageMoves(out=out))
    kv = mover.move(kv, PageMoves(copies=[(count + i, i) for i in range(1, count + 1)]))  # what was there is gone
    after = np.asarray(mover.move(kv, PageMoves(into=[(i, count + i) for i in range(1, count + 1)])))
    assert (after[count + 1 :] == before[1 : count + 1]).all()
    assert (after[1 : count + 1] == before[count + 1 :]).all()


def test_a_host_page_holds_what_was_sent_last():
    kv, mover = pages_and_mover(jnp.float32, num_pages=6, num_host_pages=1)
    before = np.array(kv)
    kv = mover.move(kv, PageMoves(out=[(1, 1)]))
    kv = mover.move(kv, PageMoves(out=[(2, 1)]))
    after = np.asarray(mover.move(kv, PageMoves(into=[(1, 5)])))
    assert (after[5] == before[2]).all()


def test_the_link_is_measured_and_every_page_keeps_what_it_holds():
    kv, mover = pages_and_mover(jnp.float32, num_pages=50, num_host_pages=40)
    before = np.array(kv)
    kv, seconds = mover.measure(kv)
    assert 0 < seconds < 1
    assert (np.asarray(kv) == before).all()
