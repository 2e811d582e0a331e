"""Choice: the engine for a request, of those that have room for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from jaxcb.cluster.beginnings import Beginnings
from jaxcb.cluster.member import Member
from jaxcb.cluster.shared_queue import Entry

MOST_AHEAD = 8
"""Answers that the engine with the longest beginning may have to do more than the idlest."""


def choose(
    entry: Entry, members: Sequence[Member], beginnings: Beginnings, *, refusing: Collection[Member], preempts: bool
) -> Member | None:
    """The one that was sent the longest beginning of the prompt, unless it has much more to do than the idlest; None if
    there is no room.

    Arguments:
        members: all, in the order that ``beginnings`` knows them by.
        refusing: those that don't take it now.
        preempts: an engine makes room for a request of a lower ``Request.priority``.
    """
    running = [member for member in members if member not in refusing and member.takes_requests]
    fitting = [member for member in running if member.has_room(entry)]
    if not fitting and preempts:
        fitting = [member for member in running if member.would_preempt(entry)]
    if not fitting:
        return None
    least = min(member.load for member in fitting)
    known = beginnings.tokens(entry.blocks, len(members))
    near = [member for member in fitting if member.load <= least + MOST_AHEAD]
    return min(near, key=lambda member: (-known[members.index(member)], member.load))
