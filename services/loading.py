"""How far a worker has loaded its model, as it tells the mesh before it serves."""

import time

from penstock.services.domain.instances import Load
from penstock.types.mesh_status import Loading

LEAST_SHARE = 0.05
"""Before it, the pace says nothing."""


class LoadingProgress:
    """Calling it tells the share of the weights that are loaded, from any thread."""

    def __init__(self) -> None:
        self._began_s, self._share = time.monotonic(), 0.0

    def __call__(self, share: float) -> None:
        self._share = min(1.0, share)

    def load(self) -> Load:
        """What is published meanwhile."""
        share, elapsed_s = self._share, time.monotonic() - self._began_s
        left_s = elapsed_s * (1 - share) / share if share >= LEAST_SHARE else None
        return Load(loading=Loading(round(share, 2), None if left_s is None else float(round(left_s))))
