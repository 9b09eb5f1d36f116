"""What a mesh file says of length stages."""

import math

from pydantic import BaseModel, Field

from penstock.services.domain.stages.bidding import MAX_TRANSFERS
from penstock.services.mesh_schema.common import FROZEN


class MeshStages(BaseModel):
    """Length stages: how often workers check their stage, and how many requests migrate at once."""

    model_config = FROZEN

    look_s: float = Field(default=0.5, gt=0)
    """Interval at which a worker checks which stage it serves and compares its load with the others."""
    refine_s: float = Field(default=5.0, gt=0)
    """Interval between two refinements of a worker's length boundary."""
    max_transfers: int = Field(default=MAX_TRANSFERS, ge=2)
    """Requests that one worker sends and receives at once."""
    shared_memory: bool = True
    """Whether workers of one host move KV through memory that they share; otherwise in messages, as between hosts."""
    kv_bandwidth_gb_per_s: float | None = Field(default=None, gt=0, lt=math.inf)
    """At which rate KV moves between two workers. None: as its moves show, once there was one."""
    bid_timeout_s: float = Field(default=0.5, gt=0)
    """How long a router waits for the first bid; those that come 50 ms after it or later are ignored."""
    turn_timeout_s: float = Field(default=10.0, gt=0)
    """A request whose transfer has not started within this time after a won bid stays where it is, unless it is starving:
    then its worker sends it next."""
