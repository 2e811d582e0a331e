"""Host bookkeeping of KV pages: which page is free, who refers to it, what its content can be reused for.

No jax comes in here: a page is a number, and the device array that it indexes belongs to ``jaxcb.step``.
"""

from jaxcb.paging.pool import TRASH_PAGE, PagePool
from jaxcb.paging.prefix import ROOT, PrefixCache

__all__ = ["ROOT", "TRASH_PAGE", "PagePool", "PrefixCache"]
