from jaxcb.paging import ROOT, PrefixCache


def cache_of(token_ids: list[int], page_size: int = 2) -> tuple[PrefixCache, list[int]]:
    """A cache that knows the full pages of ``token_ids``, which nobody uses any more."""
    cache = PrefixCache(num_pages=6, page_size=page_size)
    pages = cache.pool.allocate(len(token_ids) // page_size)
    node = ROOT
    for i, page in enumerate(pages):
        node = cache.register(node, tuple(token_ids[i * page_size : (i + 1) * page_size]), page)
    cache.pool.release(reversed(pages))
    return cache, pages


def test_the_longest_common_run_of_full_pages_is_found():
    cache, pages = cache_of([5, 6, 7, 8, 9, 9])
    assert cache.match([5, 6, 7, 8, 1], 4)[0] == pages[:2]
    assert cache.match([5, 6, 7], 3)[0] == pages[:1]
    assert cache.match([5, 7, 7, 8], 4)[0] == []


def test_a_match_never_exceeds_the_tokens_that_are_allowed():
    cache, pages = cache_of([5, 6, 7, 8])
    assert cache.match([5, 6, 7, 8], 3)[0] == pages[:1]
    assert cache.match([5, 6], 1)[0] == []


def test_equal_tokens_under_another_beginning_are_another_page():
    cache, _ = cache_of([5, 6, 7, 8])
    assert cache.match([1, 2, 7, 8], 4)[0] == []
    assert cache.match([7, 8, 1, 1], 4)[0] == []


def test_a_second_page_with_the_same_tokens_is_not_kept():
    cache, (first, _) = cache_of([5, 6, 7, 8])
    (twin,) = cache.pool.allocate(1)
    node = cache.register(ROOT, (5, 6), twin)
    assert cache.match([5, 6, 0], 2) == ([first], node)
    assert not cache.pool.is_reusable(twin)


def test_leaves_are_evicted_before_what_they_hang_on():
    cache, pages = cache_of([5, 6, 7, 8, 9, 9])
    cache.pool.allocate(4)  # three never used, and one that was kept
    assert cache.match([5, 6, 7, 8, 9, 9], 6)[0] == pages[:2]
    cache.check()
    cache.pool.allocate(2)
    assert cache.match([5, 6, 7, 8, 9, 9], 6)[0] == []
    cache.check()


def test_a_disabled_cache_keeps_nothing():
    cache = PrefixCache(num_pages=2, page_size=2, enabled=False)
    (page,) = cache.pool.allocate(1)
    cache.register(ROOT, (5, 6), page)
    cache.pool.release([page])
    assert cache.match([5, 6, 7], 2) == ([], ROOT)
    assert cache.pool.num_reusable_free == 0
