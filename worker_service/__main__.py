"""`python -m worker_service`: one worker of the tier that PENSTOCK_TIER names."""

from services.domain.instances import Role
from services.runtime import run_service
from worker_service.compose import compose

if __name__ == "__main__":
    run_service(Role.WORKER, compose)
