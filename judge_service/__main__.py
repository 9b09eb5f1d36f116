"""`python -m judge_service`: the judge."""

from judge_service.compose import compose
from services.domain.instances import Role
from services.runtime import run_service

if __name__ == "__main__":
    run_service(Role.JUDGE, compose)
