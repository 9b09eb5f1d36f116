"""Reads the early checks that `penstock measure --early-after ... --json` has fitted."""

import json
from pathlib import Path

from penstock.client.plans import EarlyCheck
from penstock.services.acceptance.pipeline import tier_problems
from penstock.types.rules import TierRules


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
            str(tier): tuple(EarlyCheck(int(c["after_tokens"]), float(c["reject_below"])) for c in one["checks"])
            for tier, one in fitted.items()
            if one is not None
        }
    except OSError as error:
        raise EarlyChecksError(f"{path}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise EarlyChecksError(f"{path}: not the output of `penstock measure --early-after`: {error!r}") from None
    for tier, of_tier in checks.items():
        for problem in tier_problems((TierRules(early_checks=of_tier), TierRules()), "tiers"):
            field = problem.field.replace("tiers[0].early_checks", f"early_checks.{tier}.checks")
            raise EarlyChecksError(f"{path}: {field}: {problem.problem}")
    return {tier: of_tier for tier, of_tier in checks.items() if of_tier}
