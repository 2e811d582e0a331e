"""The reference itself, where the answer is known without computing it."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np

import pallas_kernels
from pallas_kernels import reference
from tests.pallas_kernels.batches import ragged_batch


def values_seen(batch, sequence, positions):
    """V of some positions of a sequence, straight from the pool, repeated for the query heads."""
    page_size = batch.kv_pages.shape[1]
    pages = batch.block_tables[sequence, positions // page_size]
    values = batch.kv_pages[pages * 2 * batch.num_layers + 2 * batch.layer + 1, positions % page_size]
    return np.repeat(values.astype(np.float64), batch.q.shape[1] // values.shape[1], axis=1)


def test_one_position_gets_all_the_weight():
    batch = ragged_batch([(1, 1)])
    np.testing.assert_allclose(batch.expected()[0], values_seen(batch, 0, np.array([0]))[0])


def test_equal_scores_average_the_positions_up_to_the_token():
    batch = ragged_batch([(3, 12)])
    flat = dataclasses.replace(batch, q=np.zeros_like(batch.q))
    for token, seen in enumerate((10, 11, 12)):
        np.testing.assert_allclose(flat.expected()[token], values_seen(batch, 0, np.arange(seen)).mean(0))


def test_a_window_leaves_the_newest_positions():
    batch = ragged_batch([(1, 30)], window=5)
    flat = dataclasses.replace(batch, q=np.zeros_like(batch.q))
    np.testing.assert_allclose(flat.expected()[0], values_seen(batch, 0, np.arange(25, 30)).mean(0))


def test_a_soft_cap_flattens_the_weights():
    batch = ragged_batch([(1, 30)])
    mean = values_seen(batch, 0, np.arange(30)).mean(0)
    np.testing.assert_allclose(batch.expected(soft_cap=1e-6)[0], mean, rtol=1e-4, atol=1e-5)
    assert np.abs(batch.expected()[0] - mean).max() > 0.1


def test_every_public_function_takes_a_backend_and_has_its_twin_here():
    public = {name: getattr(pallas_kernels, name) for name in pallas_kernels.__all__}
    functions = {name: each for name, each in public.items() if inspect.isfunction(each)}
    assert {"ragged_paged_attention", "gather_pages", "add_rms_norm"} < functions.keys()
    without_twin = {name for name in functions if not hasattr(reference, name)}
    assert without_twin == {"attention_metadata", "group_rows", "default_backend"}, "lists of work are no numbers"
    alike = functions.keys() - {"group_rows", "default_backend"}
    assert all("backend" in inspect.signature(functions[name]).parameters for name in alike)


def test_decodes_are_the_ragged_batch_of_one_token_each():
    batch = ragged_batch([(1, 30), (1, 1)], decode_only=True, num_seqs=3)
    got = reference.decode_attention(
        batch.q, batch.kv_pages, batch.context_lens, batch.block_tables, layer=batch.layer, num_layers=batch.num_layers
    )
    np.testing.assert_array_equal(got, batch.expected())
    assert not got[2].any(), "padding"
