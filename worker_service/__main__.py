"""`python -m penstock.worker_service`: one worker of the tier that PENSTOCK_TIER names, or a part of its server."""

from penstock.services.domain.instances import Role
from penstock.services.processes import exits_on_unusable_settings
from penstock.services.runtime import run_service
from penstock.services.settings import ServiceSettings
from penstock.worker_service.compose import compose, run_server_part

if __name__ == "__main__":
    with exits_on_unusable_settings(Role.WORKER.value):
        settings = ServiceSettings.load()
        node = settings.server_node
    if node is not None and node.rank:
        run_server_part(settings)
    run_service(Role.WORKER, compose)
