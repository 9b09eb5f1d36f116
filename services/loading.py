"""How far a worker has loaded its model, as it tells the mesh before it serves."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.services.domain.instances import Load
from penstock.types.mesh_status import Loading

LEAST_SHARE = 0.05
"""Before it, the pace says nothing."""


@dataclass(slots=True)
class LoadingProgress:
    """Calling it tells the share of the weights that are loaded, from any thread."""

    clock: Callable[[], float] = time.monotonic
    _share: float = 0.0
    _began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._began_s = self.clock()

    def __call__(self, share: float) -> None:
        self._share = min(1.0, share)

    def load(self) -> Load:
        """What is published meanwhile."""
        share, elapsed_s = self._share, self.clock() - self._began_s
        left_s = elapsed_s * (1 - share) / share if share >= LEAST_SHARE else None
        return Load(loading=Loading(round(share, 2), None if left_s is None else float(round(left_s))))
