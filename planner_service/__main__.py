"""`python -m penstock.planner_service`: the planner."""

from penstock.planner_service.compose import compose
from penstock.services.domain.instances import Role
from penstock.services.runtime import run_service

if __name__ == "__main__":
    run_service(Role.PLANNER, compose)
