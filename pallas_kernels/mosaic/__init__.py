"""The mosaic backend: prompt chunks on Hopper through Pallas's Mosaic GPU (TMA, wgmma). Single tokens go to triton."""

MOSAIC_ROWS = 64
"""Rows of a query tile: what one wgmma of one warpgroup takes."""
