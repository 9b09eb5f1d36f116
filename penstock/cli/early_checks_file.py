"""Reads the early checks that `penstock measure --early-after ... --json` has fitted."""

import json
from pathlib import Path

from penstock.client.plans import EarlyCheck
from services.domain.early_checks import EarlyCheck as DomainCheck
from services.domain.early_checks import early_check_problems


class EarlyChecksError(ValueError):
    """A file has no such checks; the message names the file and the field."""


def read_early_checks(path: Path) -> dict[str, tuple[EarlyCheck, ...]]:
    """The checks by tier; tiers without any are left out.

    Raises:
        EarlyChecksError: The file cannot be read, or is no output of `penstock measure`.
    """
    try:
        fitted = json.loads(path.read_text())["early_checks"]
        checks = {
            str(tier): tuple(DomainCheck(int(c["after_tokens"]), float(c["reject_below"])) for c in one["checks"])
            for tier, one in fitted.items()
            if one is not None
        }
    except OSError as error:
        raise EarlyChecksError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise EarlyChecksError(f"{path}: not the output of `penstock measure --early-after`: {error!r}") from None
    for tier, of_tier in checks.items():
        if problems := [*early_check_problems(of_tier, f"early_checks.{tier}.checks")]:
            raise EarlyChecksError(f"{path}: {problems[0].field}: {problems[0].problem}")
    return {
        tier: tuple(EarlyCheck(check.after_tokens, check.reject_below) for check in of_tier)
        for tier, of_tier in checks.items()
        if of_tier
    }
