"""A judged sample of the present workload from requests that only some tiers have seen. No I/O.

A request's record has tokens and scores of the tiers it visited; the last tier's answers are judged only if the best answer
is delivered, if there is another one. What is missing is borrowed from a stored judged sample: from a prompt that is near in
everything the record does have (nearest-neighbour hot deck; Andridge and Little, 2010). Whether a tier was visited depends on
scores that the record has, so the borrowing is sound as long as, among requests alike in those, later tiers do as they did in
the stored sample (missing at random; docs/adr/0013).
"""

from collections.abc import Sequence

import numpy as np

from penstock.planner_service.routing.quality import JudgedSample
from penstock.planner_service.simulator.workload import Floats, Ints
from penstock.services.domain.errors import invalid
from penstock.services.domain.workload import RequestRecord

NEAREST = 5  # donors that one is drawn from
MOST_STRETCHED = 4.0  # a borrowed reply is lengthened or shortened by at most so much


def imputed(profile: JudgedSample, records: Sequence[RequestRecord], prompts: int, seed: int) -> JudgedSample:
    """`prompts` prompts like `records`, judged on every tier: records drawn by weight, each time with a newly drawn donor.

    profile: the stored sample, N prompts judged on every tier. A borrowed reply's length is scaled by how the record's own
    replies compare with the donor's. Scores that were predicted are the records'; where a record has none, the donor's. A
    quality apart from the score is always the donor's.

    Raises:
        InvalidRequest: no record has a visit to a tier of the profile.
    """
    place = {tier: i for i, tier in enumerate(profile.tiers)}
    usable = [r for r in records if any(v.tier in place for v in r.visits)]
    if not usable:
        raise invalid("records", f"none of {len(records)} visited {', '.join(profile.tiers)}")
    inputs, outputs, scores = _columns(usable, place)
    features = _features(profile.input_tokens, profile.output_tokens, profile.scores)  # (N, 1+2C)
    scale = np.maximum(features.std(axis=0), 1e-9)
    seen = _features(inputs, outputs, scores)  # (R, 1+2C), NaN where the tier did not see it
    rng = np.random.default_rng(seed)
    weight = np.array([r.weight for r in usable])
    # systematic sampling: each record as often as its weight says, but for one
    points = (np.arange(prompts) + rng.random()) * weight.sum() / prompts
    drawn = np.minimum(np.searchsorted(np.cumsum(weight), points), len(usable) - 1)
    donor = np.empty(prompts, np.int64)
    for r in np.unique(drawn):
        apart = np.nansum(((features - seen[r]) / scale) ** 2, axis=1)
        nearest = np.argsort(apart, kind="stable")[:NEAREST]
        own = drawn == r
        donor[own] = rng.choice(nearest, int(own.sum()))
    known_out, known_score = outputs[drawn], scores[drawn]  # (prompts, C)
    lent = profile.output_tokens[donor].astype(float)
    with np.errstate(invalid="ignore"):
        ratio = np.log(known_out / lent)
    known = np.maximum(1, (~np.isnan(ratio)).sum(axis=1, keepdims=True))
    stretch = np.exp(np.nansum(ratio, axis=1, keepdims=True) / known)
    lent = np.maximum(1, np.round(lent * np.clip(stretch, 1 / MOST_STRETCHED, MOST_STRETCHED)))
    # routers do not sample reasons: of an answer that they sampled, a score of 0 counts as a refusal
    lent_refused = np.zeros(known_score.shape, np.bool_) if profile.refused is None else profile.refused[donor]
    return JudgedSample(
        profile.tiers,
        inputs[drawn].astype(np.int64),
        np.where(np.isnan(known_out), lent, known_out).astype(np.int64),
        np.where(np.isnan(known_score), profile.scores[donor], known_score),
        _predicted(profile, usable, drawn, donor),
        drafts=profile.drafts,
        known_quality=None if profile.known_quality is None else profile.known_quality[donor],
        refused=np.where(np.isnan(known_score), lent_refused, known_score == 0),
    )


def _columns(records: Sequence[RequestRecord], place: dict[str, int]) -> tuple[Floats, Floats, Floats]:
    """Input tokens (R), and output tokens and scores of answers (R, C), NaN for what is not known."""
    shape = (len(records), len(place))
    outputs, scores = np.full(shape, np.nan), np.full(shape, np.nan)
    for i, record in enumerate(records):
        for visit in record.visits:
            if visit.tier in place:
                outputs[i, place[visit.tier]] = max(1, visit.output_tokens)
                if visit.score is not None:
                    scores[i, place[visit.tier]] = visit.score
    return np.maximum(1.0, np.array([r.input_tokens for r in records], float)), outputs, scores


def _predicted(profile: JudgedSample, records: Sequence[RequestRecord], drawn: Ints, donor: Ints) -> Floats | None:
    """(prompts, C) predicted scores; None if neither records nor the profile have any.

    NaN where there is none: no tier is passed over for it.
    """
    if profile.predicted is None and not any(record.predicted for record in records):
        return None
    known = np.full((len(records), len(profile.tiers)), np.nan)
    for i, record in enumerate(records):
        of_record = dict(record.predicted)
        known[i] = [of_record.get(tier, np.nan) for tier in profile.tiers]
    borrowed = np.full_like(known[drawn], np.nan) if profile.predicted is None else profile.predicted[donor]
    return np.where(np.isnan(known[drawn]), borrowed, known[drawn])


def _features(inputs: Floats | Ints, outputs: Floats | Ints, scores: Floats) -> Floats:
    """What prompts are alike in: lengths, by their logarithms, and scores."""
    return np.hstack([np.log(np.maximum(inputs, 1.0))[:, None], np.log(np.maximum(outputs, 1.0)), scores])
