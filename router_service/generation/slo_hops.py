"""Which instances of a tier are asked to keep one reply's SLO, and how long. No I/O."""

from penstock.services.mesh_schema import MeshSlo
from penstock.types.slo import SloFallback


class SloHops:
    """The instances of one tier that have declined one reply."""

    def __init__(self, limits: MeshSlo, fallback: SloFallback, now_s: float) -> None:
        self._limits, self._fallback, self._began_s = limits, fallback, now_s
        self.declined: set[str] = set()

    def is_declined(self, instance_id: str, now_s: float, *, begun: bool) -> bool:
        """Whether the reply ends as declined instead of trying this instance. begun: it has tokens, so it must end."""
        if self._fallback is not SloFallback.DECLINE or begun or not self.declined:
            return False
        return instance_id in self.declined or not self._may_try(len(self.declined), now_s)

    def gives_up_waiting(self, *, begun: bool) -> bool:
        """Whether the reply ends as declined if there is no place for it before its first token is due."""
        return self._fallback is SloFallback.DECLINE and not begun

    def asks_to_decline(self, others: int, now_s: float, *, begun: bool) -> bool:
        """Whether the next instance shall decline rather than serve the reply as best effort.

        others: further instances that have not declined.
        """
        if self._fallback is SloFallback.DECLINE and not begun:
            return True
        return others > 0 and self._may_try(len(self.declined) + 1, now_s)

    def _may_try(self, hop: int, now_s: float) -> bool:
        return hop <= self._limits.max_hops and now_s - self._began_s <= self._limits.hop_time_s
