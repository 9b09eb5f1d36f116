"""`python -m router_service`: a router."""

from router_service.compose import compose
from services.domain.instances import Role
from services.runtime import run_service

if __name__ == "__main__":
    run_service(Role.ROUTER, compose)
