"""One metrics page for the processes of a service: the samples of each process, labelled with its index."""

import logging
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from penstock.services.processes import Watched

_log = logging.getLogger(__name__)

LABEL = "penstock_process"
READ_TIMEOUT_S = 2.0  # for the page of one process: a stuck process must not delay the scrape past its own timeout
MAX_PAGE_BYTES = 16 << 20  # a page has some 100 KiB


class GroupMetrics(Collector):
    """Reads the metrics page of each process at every scrape.

    ports: the loopback ports of the pages, by the processes' indices. processes: filled by the caller, in that order.
    """

    def __init__(self, service: str, ports: Sequence[int]) -> None:
        self._service, self._ports = service, tuple(ports)
        self.processes: list[Watched] = []

    def collect(self) -> Iterable[Metric]:
        with ThreadPoolExecutor(len(self._ports)) as threads:
            pages = [*threads.map(_read, self._ports)]
        prefix = f"penstock_{self._service}_process"
        up = GaugeMetricFamily(f"{prefix}_up", "Whether the process answers: 1 or 0.", labels=[LABEL])
        restarts = CounterMetricFamily(f"{prefix}_restarts", "Times that the process was restarted.", labels=[LABEL])
        families: dict[str, Metric] = {}
        for index, page in enumerate(pages):
            up.add_metric([str(index)], page is not None)
            if index < len(self.processes):
                restarts.add_metric([str(index)], self.processes[index].restarts)
            for family in text_string_to_metric_families(page or ""):
                known = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                known.samples += [s._replace(labels=s.labels | {LABEL: str(index)}) for s in family.samples]
        return [up, restarts, *families.values()]


def _read(port: int) -> str | None:
    """Read the page of a process; None if it does not respond."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=READ_TIMEOUT_S) as response:
            return str(response.read(MAX_PAGE_BYTES).decode())
    except (OSError, ValueError) as error:  # the process is starting, or has ended
        _log.debug("no metrics from the process at port %d: %s", port, error)
        return None
