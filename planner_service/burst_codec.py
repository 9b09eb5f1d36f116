"""Burst ladders: domain to proto and to JSON, and back."""

from typing import Any

from penstock.proto.planner.v1 import planner_pb2 as pb
from services.domain.bursts import MAX_BURST_STEPS, BurstLadder, BurstStep, BurstThreshold
from services.proto_codec import at_most

MAX_THRESHOLDS = 63  # a plan has at most 64 tiers


def ladder_to_proto(ladder: BurstLadder) -> pb.BurstLadder:
    return pb.BurstLadder(
        mean_quality=ladder.mean_quality,
        steps=[
            pb.BurstStep(
                thresholds=[pb.BurstThreshold(score=rule.score, tie_share=rule.tie_share) for rule in step.thresholds],
                quality=step.quality,
                rate_per_s=step.rate_per_s,
                tier=step.tier,
                tier_share=step.tier_share,
            )
            for step in ladder.steps
        ],
    )


def ladder_from_proto(ladder: pb.BurstLadder, path: str) -> BurstLadder:
    """What the fields mean together is checked by `Plan.validate`.

    Raises:
        InvalidRequest: There is too much of something; names the field.
    """
    at_most(ladder.steps, MAX_BURST_STEPS, f"{path}.steps", "steps")
    for i, step in enumerate(ladder.steps):
        at_most(step.thresholds, MAX_THRESHOLDS, f"{path}.steps[{i}].thresholds", "thresholds")
    return BurstLadder(
        ladder.mean_quality,
        tuple(
            BurstStep(
                tuple(
                    BurstThreshold(rule.score, rule.tie_share if rule.HasField("tie_share") else 1.0)
                    for rule in step.thresholds
                ),
                step.quality,
                step.rate_per_s,
                step.tier,
                step.tier_share,
            )
            for step in ladder.steps
        ),
    )


def ladder_to_json(ladder: BurstLadder | None) -> dict[str, Any] | None:
    """As in a plan file: the threshold of a tier that is not used is None."""
    if ladder is None:
        return None
    return {
        "mean_quality": ladder.mean_quality,
        "steps": [
            {
                "thresholds": [None if rule.score > 100 else rule.score for rule in step.thresholds],
                "tie_shares": [rule.tie_share for rule in step.thresholds],
                "quality": step.quality,
                "rate_per_s": step.rate_per_s,
                "tier": step.tier,
                "tier_share": step.tier_share,
            }
            for step in ladder.steps
        ],
    }


def ladder_from_json(ladder: dict[str, Any] | None, skipped: float) -> BurstLadder | None:
    """What `ladder_to_json` returned. skipped: the threshold of a tier that is not used.

    Raises:
        KeyError, TypeError, ValueError: It is something else.
    """
    if ladder is None:
        return None
    return BurstLadder(
        float(ladder["mean_quality"]),
        tuple(
            BurstStep(
                tuple(
                    BurstThreshold(skipped if score is None else float(score), float(share))
                    for score, share in zip(step["thresholds"], step["tie_shares"], strict=True)
                ),
                float(step["quality"]),
                float(step["rate_per_s"]),
                str(step["tier"]),
                float(step["tier_share"]),
            )
            for step in ladder["steps"]
        ),
    )
