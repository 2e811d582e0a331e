import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxcb.paging import PagePool


def test_pages_come_in_order_and_never_the_trash_page():
    pool = PagePool(4)
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(RuntimeError, match="asked for 1 pages, 0 of 4"):
        pool.allocate(1)


def test_a_shared_page_is_free_only_after_its_last_release():
    pool = PagePool(2)
    (page,) = pool.allocate(1)
    pool.retain(page)
    pool.release([page])
    assert pool.refcount(page) == 1 and pool.num_free == 1
    pool.release([page])
    assert pool.num_free == 2
    with pytest.raises(RuntimeError, match="released more often"):
        pool.release([page])


def test_pages_worth_keeping_are_given_out_last_and_oldest_first():
    evicted = []
    pool = PagePool(4, on_evict=evicted.append)
    pages = pool.allocate(4)
    for page in (2, 3):
        pool.keep_for_reuse(page)
    pool.release([3])
    pool.release([2])
    pool.release([1])
    pool.release([4])
    assert pages == [1, 2, 3, 4]
    assert pool.num_reusable_free == 2
    assert pool.allocate(2) == [4, 1]
    assert pool.allocate(2) == [3, 2]
    assert evicted == [3, 2]
    assert pool.num_reusable_free == 0


def test_a_kept_page_can_be_taken_up_again_and_a_forgotten_one_not():
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.keep_for_reuse(first)
    pool.release([first, second])
    pool.retain(first)
    assert pool.refcount(first) == 1 and pool.num_free == 1
    with pytest.raises(RuntimeError, match="holds nothing"):
        pool.retain(second)
    pool.check()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("arkx"), st.integers(0, 7)), max_size=60))
def test_random_use_keeps_every_page_either_free_or_used(operations):
    evicted: list[int] = []
    pool = PagePool(8, on_evict=evicted.append)
    held: list[int] = []
    for kind, number in operations:
        if kind == "a" and number <= pool.num_free:
            held += pool.allocate(number)
        elif held and kind == "r":
            pool.release([held.pop(number % len(held))])
        elif held and kind == "k":
            pool.keep_for_reuse(held[number % len(held)])
        elif held and kind == "x":
            pool.retain(held[number % len(held)])
            held.append(held[number % len(held)])
        pool.check()
        assert all(pool.refcount(page) == held.count(page) for page in range(1, 9))
        assert pool.num_used == len(set(held))
