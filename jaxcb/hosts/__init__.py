"""One engine over the devices of several hosts. The first host schedules and answers; the others hold their parts of
the model and of the KV cache, and carry out the orders that its runner gives.

Nothing here looks inside an order, and no scheduler knows of it.
"""

from jaxcb.hosts.follower import follow
from jaxcb.hosts.start import start

__all__ = ["follow", "start"]
