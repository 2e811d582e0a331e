from jaxcb.request import SamplingParams
from tests.engine.run import complete


def test_a_prefix_hit_of_more_pages_than_an_upload_holds_is_right(make_engine):
    """80 pages of 8 tokens are found at once, in a step whose own upload holds far fewer block-table changes."""
    engine = make_engine(page_size=8, num_kv_pages=300, max_num_batched_tokens=16, max_num_seqs=4)
    prompt = [(7 * i) % 251 for i in range(650)]
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    first, second = (complete(engine, [prompt], sampling)[0] for _ in range(2))
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 648)
    assert first.token_ids == second.token_ids
