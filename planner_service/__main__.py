"""`python -m planner_service`: the planner."""

from planner_service.compose import compose
from services.domain.instances import Role
from services.runtime import run_service

if __name__ == "__main__":
    run_service(Role.PLANNER, compose)
