from jaxcb.paging import Match, PrefixCache, pack_tokens


def cache_of(token_ids: list[int], page_size: int = 2, *, num_pages: int = 6, num_host_pages: int = 0):
    """A cache that knows the full pages of ``token_ids``, which nobody uses any more; and these pages."""
    cache = PrefixCache(num_pages, page_size, num_host_pages=num_host_pages)
    return cache, learn(cache, token_ids)


def learn(cache: PrefixCache, token_ids: list[int], salt: str = "") -> list[int]:
    """Compute all pages of a prompt anew, register them, and release them."""
    size = cache.page_size
    pages = cache.pool.allocate(len(token_ids) // size)
    node, held = cache.root(salt), []
    for i, page in enumerate(pages):
        node, known = cache.register(node, pack_tokens(token_ids[i * size : (i + 1) * size]), page)
        held += [page] if known == page else [known, page]
    cache.pool.release(reversed(held))
    return pages


def find(cache: PrefixCache, token_ids: list[int], max_tokens: int | None = None, salt: str = "") -> list[int]:
    limit = len(token_ids) if max_tokens is None else max_tokens
    return cache.match(cache.root(salt), pack_tokens(token_ids), limit).pages


def test_the_longest_common_run_of_full_pages_is_found():
    cache, pages = cache_of([5, 6, 7, 8, 9, 9])
    assert find(cache, [5, 6, 7, 8, 1], 4) == pages[:2]
    assert find(cache, [5, 6, 7], 3) == pages[:1]
    assert find(cache, [5, 7, 7, 8], 4) == []


def test_a_match_never_exceeds_the_tokens_that_are_allowed():
    cache, pages = cache_of([5, 6, 7, 8])
    assert find(cache, [5, 6, 7, 8], 3) == pages[:1]
    assert find(cache, [5, 6], 1) == []


def test_equal_tokens_under_another_beginning_are_another_page():
    cache, _ = cache_of([5, 6, 7, 8])
    assert find(cache, [1, 2, 7, 8]) == []
    assert find(cache, [7, 8, 1, 1]) == []


def test_another_salt_shares_nothing():
    cache, pages = cache_of([5, 6, 7, 8])
    assert find(cache, [5, 6, 7, 8], salt="theirs") == []
    theirs = learn(cache, [5, 6, 7, 8], salt="theirs")
    assert find(cache, [5, 6, 7, 8], salt="theirs") == theirs
    assert find(cache, [5, 6, 7, 8]) == pages


def test_prefixes_whose_hashes_collide_are_told_apart():
    """CVE-2025-25183: hashes of prefixes could be made to collide, and a request was served from another's pages."""

    class Colliding(bytes):
        def __hash__(self) -> int:
            return 7

    cache = PrefixCache(num_pages=6, page_size=2)
    root = cache.root()
    first, second = cache.pool.allocate(2)
    cache.register(root, Colliding(pack_tokens([5, 6])), first)
    cache.register(root, Colliding(pack_tokens([7, 8])), second)
    one, other = (root, Colliding(pack_tokens([5, 6]))), (root, Colliding(pack_tokens([7, 8])))
    assert hash(one) == hash(other), "this test needs keys that collide"
    assert (cache._page_of[one][0], cache._page_of[other][0]) == (first, second)
    cache.check()


def test_a_second_page_with_the_same_tokens_is_not_kept_and_holds_on_to_the_first():
    cache, (first, _) = cache_of([5, 6, 7, 8])
    (twin,) = cache.pool.allocate(1)
    node, known = cache.register(cache.root(), pack_tokens([5, 6]), twin)
    assert known == first and cache.pool.refcount(first) == 1
    assert cache.match(cache.root(), pack_tokens([5, 6, 0]), 2) == Match([first], node)
    assert not cache.pool.is_reusable(twin)


def test_registering_a_page_again_takes_no_second_reference():
    cache, (page, _) = cache_of([5, 6, 7, 8])
    cache.take([page])
    _, known = cache.register(cache.root(), pack_tokens([5, 6]), page)
    assert known == page and cache.pool.refcount(page) == 1


def test_leaves_are_evicted_before_what_they_hang_on():
    cache, pages = cache_of([5, 6, 7, 8, 9, 9])
    cache.pool.allocate(4)  # three never used, and one that was kept
    assert find(cache, [5, 6, 7, 8, 9, 9]) == pages[:2]
    cache.check()
    cache.pool.allocate(2)
    assert find(cache, [5, 6, 7, 8, 9, 9]) == []
    cache.check()


def test_a_branch_computed_beside_its_twin_is_evicted_before_the_common_beginning():
    """Two sequences compute the same first page at once; only one of the two pages is known, and it must outlive the
    second sequence's later page, which could not be found without it."""
    cache = PrefixCache(num_pages=4, page_size=2)
    root = cache.root()
    first, twin, leaf = cache.pool.allocate(3)
    node, _ = cache.register(root, pack_tokens([5, 6]), first)
    node, known = cache.register(root, pack_tokens([5, 6]), twin)
    cache.register(node, pack_tokens([7, 8]), leaf)
    cache.pool.release([first])  # the first sequence ends long before the second
    cache.pool.release([leaf, twin, known])
    cache.pool.allocate(3)
    assert find(cache, [5, 6, 7, 8]) == [first]


def test_least_recently_used_prefixes_go_first():
    cache, old = cache_of([1, 1, 2, 2], num_pages=4)
    new = learn(cache, [3, 3, 4, 4])
    cache.pool.release(reversed(cache.take(old)))
    cache.pool.allocate(2)
    assert find(cache, [1, 1, 2, 2]) == old and find(cache, [3, 3, 4, 4]) == []
    assert sorted(old + new) == [1, 2, 3, 4]


def test_pinned_pages_stay_whatever_is_needed():
    cache, pages = cache_of([5, 6, 7, 8], num_pages=4)
    assert cache.pin(cache.root(), pack_tokens([5, 6, 7, 8])) == 2
    cache.pool.release(cache.pool.allocate(2))
    assert cache.pool.num_free == 2 and find(cache, [5, 6, 7, 8]) == pages
    cache.unpin()
    cache.pool.allocate(4)
    assert find(cache, [5, 6, 7, 8]) == []


def test_after_a_reset_nothing_is_found_and_everything_is_free():
    cache, _ = cache_of([5, 6, 7, 8], num_pages=2, num_host_pages=2)
    learn(cache, [1, 1, 2, 2])  # the first prefix is in host memory now
    cache.pin(cache.root(), pack_tokens([1, 1]))
    cache.take_moves()
    cache.reset()
    cache.take_moves()
    cache.check()
    assert find(cache, [5, 6, 7, 8]) == find(cache, [1, 1, 2, 2]) == []
    assert cache.pool.num_free == 2 and cache.pool.num_reusable_free == 0
    assert cache.host.num_free == 2 and cache.host.num_cached == 0


def test_a_sequence_that_ran_through_a_reset_teaches_nothing():
    cache = PrefixCache(num_pages=4, page_size=2)
    before = cache.root()
    cache.reset()
    (page,) = cache.pool.allocate(1)
    cache.register(before, pack_tokens([5, 6]), page)
    assert find(cache, [5, 6]) == []


def test_evicted_pages_move_to_host_memory_and_come_back_on_a_hit():
    cache, pages = cache_of([5, 6, 7, 8], num_pages=2, num_host_pages=2)
    others = cache.pool.allocate(2)
    assert cache.take_moves().out == [(pages[1], 1), (pages[0], 2)]
    found = find(cache, [5, 6, 7, 8])
    assert found == [-2, -1] and cache.num_to_take(found) == 2
    cache.pool.release(others)
    back = cache.take(found)
    assert cache.take_moves().into == [(2, back[0]), (1, back[1])]
    assert find(cache, [5, 6, 7, 8]) == back
    cache.check()


def test_host_memory_forgets_the_least_recently_used_when_it_is_full():
    cache, _ = cache_of([5, 6, 7, 8], num_pages=2, num_host_pages=1)
    cache.pool.allocate(2)
    assert find(cache, [5, 6, 7, 8]) == [-1], "the leaf went first, and made room for what it hung on"
    cache.check()


def test_a_host_page_that_is_still_to_be_read_is_not_given_out():
    cache, _ = cache_of([5, 6], num_pages=2, num_host_pages=1)
    others = cache.pool.allocate(2)
    cache.take_moves()
    cache.pool.release(others)
    cache.take(find(cache, [5, 6]))
    assert cache.host.num_free == 0, "the step that reads it was not handed over yet"
    cache.take_moves()
    assert cache.host.num_free == 1


def test_a_prefix_that_is_computed_again_needs_no_copy_in_host_memory():
    cache, _ = cache_of([5, 6], num_pages=1, num_host_pages=1)
    (page,) = cache.pool.allocate(1)
    assert find(cache, [5, 6]) == [-1]
    cache.register(cache.root(), pack_tokens([5, 6]), page)
    assert find(cache, [5, 6]) == [page]
    cache.take_moves()
    cache.check()
    assert cache.host.num_cached == 0 and cache.host.num_free == 1


def test_a_disabled_cache_keeps_nothing():
    cache = PrefixCache(num_pages=2, page_size=2, enabled=False)
    assert find(cache, [5, 6, 7], 2) == []
