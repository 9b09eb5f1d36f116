"""`python -m penstock.judge_service`: the judge."""

from penstock.judge_service.compose import compose
from penstock.services.domain.instances import Role
from penstock.services.runtime import run_service

if __name__ == "__main__":
    run_service(Role.JUDGE, compose)
