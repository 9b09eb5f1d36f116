"""`python -m penstock.worker_service`: one worker of the tier that PENSTOCK_TIER names."""

from penstock.services.domain.instances import Role
from penstock.services.runtime import run_service
from penstock.worker_service.compose import compose

if __name__ == "__main__":
    run_service(Role.WORKER, compose)
