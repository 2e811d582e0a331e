"""Host bookkeeping of KV pages: which page is free, who refers to it, what its content can be reused for.

No jax comes in here: a page is a number, and the arrays that it indexes belong to ``jaxcb.step``.
"""

from jaxcb.paging.host import HostPool
from jaxcb.paging.moves import PageMoves
from jaxcb.paging.pool import TRASH_PAGE, PagePool
from jaxcb.paging.prefix import Match, Node, PrefixCache, pack_tokens

__all__ = ["TRASH_PAGE", "HostPool", "Match", "Node", "PageMoves", "PagePool", "PrefixCache", "pack_tokens"]
