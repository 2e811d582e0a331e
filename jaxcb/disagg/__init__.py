"""Prefill and decode on engines of their own, so that long prompts can't slow running answers down.

Nothing here looks inside a page or a step: engines gather and scatter pages, a connector carries them.
"""

from jaxcb.disagg.front import Disaggregated, Link
from jaxcb.disagg.local import LocalLink
from jaxcb.disagg.prompts import PromptService

__all__ = ["Disaggregated", "Link", "LocalLink", "PromptService"]
