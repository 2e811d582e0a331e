"""Prefill and decode on engines of their own, so that long prompts can't slow running answers down.

Nothing here knows of pages or devices: engines export and import the KV of a beginning.
"""

from jaxcb.disagg.pair import PrefillDecodePair

__all__ = ["PrefillDecodePair"]
