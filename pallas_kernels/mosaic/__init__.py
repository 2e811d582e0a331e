"""The mosaic backend: prompt chunks on Hopper through Pallas's Mosaic GPU (TMA, wgmma). Single tokens go to triton."""
