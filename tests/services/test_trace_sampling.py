"""Which requests are traced."""

import math
from random import Random

import pytest

from penstock.services.trace_sampling import NOTHING, Caller, SamplingLimits, TraceSampler
from penstock.token_bucket import BURST_S, TokenBucket
from tests.support.telemetry_off import EVERYTHING

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLERS = (Caller.SILENT, Caller.SAMPLED)


@pytest.mark.parametrize(
    ("traceparent", "caller"),
    [
        (None, Caller.SILENT),
        ("", Caller.SILENT),
        (f"00-{TRACE}-{SPAN}-01", Caller.SAMPLED),
        (f"00-{TRACE}-{SPAN}-03", Caller.SAMPLED),
        (f"00-{TRACE}-{SPAN}-00", Caller.NOT_SAMPLED),
        (f"00-{TRACE}-{SPAN}-02", Caller.NOT_SAMPLED),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-brings", Caller.SAMPLED),
        (f"ff-{TRACE}-{SPAN}-01", Caller.SILENT),
        (f"00-{'0' * 32}-{SPAN}-01", Caller.SILENT),
        (f"00-{TRACE}-{'0' * 16}-01", Caller.SILENT),
        (f"00-{TRACE.upper()}-{SPAN}-01", Caller.SILENT),
        (f"00-{TRACE}-{SPAN}-01" + "0" * 10_000, Caller.SILENT),
        ("01" * 10_000, Caller.SILENT),
    ],
)
def test_a_traceparent_says_whether_its_caller_samples(traceparent: str | None, caller: Caller) -> None:
    """By W3C Trace Context; what is malformed says nothing."""
    assert Caller.of(traceparent) is caller


def test_a_bucket_admits_its_burst_and_then_its_rate() -> None:
    bucket = TokenBucket(2.0, now_s=100.0)
    assert sum(bucket.take(100.0) for _ in range(1000)) == 2 * BURST_S
    assert sum(bucket.take(100.0 + i / 1000) for i in range(30_000)) == pytest.approx(60, abs=1)


def test_a_bucket_of_a_small_rate_holds_one() -> None:
    bucket = TokenBucket(0.001, now_s=0.0)
    assert [bucket.take(0.0), bucket.take(0.0), bucket.take(1001.0)] == [True, False, True]


@pytest.mark.parametrize("share", [0.05, 0.5])
@pytest.mark.parametrize("caller", CALLERS)
def test_a_share_of_the_requests_is_traced(share: float, caller: Caller) -> None:
    """Within four standard deviations."""
    sampler, count = TraceSampler(SamplingLimits(share, per_s=0.0), 0.0, Random(3).random), 20_000
    traced = sum(sampler.samples(caller, i / 1000) for i in range(count))
    assert abs(traced - share * count) < 4 * math.sqrt(share * (1 - share) * count)


def test_the_traces_of_each_kind_are_bounded_and_none_takes_anothers_room() -> None:
    """A client that asks for traces without end takes them from nobody who does not ask, and failures keep their own."""
    limits = SamplingLimits(share=0.0, per_s=1.0)
    sampler = TraceSampler(limits, 0.0, Random(3).random)
    assert sum(sampler.samples(Caller.SAMPLED, i / 1000) for i in range(10_000)) == pytest.approx(2 * BURST_S, abs=1)
    assert sum(sampler.samples(Caller.SILENT, 10.0) for _ in range(10_000)) == BURST_S
    assert sum(sampler.keeps(10.0) for _ in range(10_000)) == BURST_S


@pytest.mark.parametrize("limits", [EVERYTHING, SamplingLimits(share=0.5, per_s=1000.0)])
def test_a_caller_that_does_not_sample_gets_no_trace(limits: SamplingLimits) -> None:
    sampler = TraceSampler(limits, 0.0, Random(3).random)
    assert not any(sampler.samples(Caller.NOT_SAMPLED, float(i)) for i in range(100))


def test_everything_and_nothing() -> None:
    everything, nothing = (TraceSampler(limits, 0.0, Random(3).random) for limits in (EVERYTHING, NOTHING))
    for _ in range(100):
        assert everything.keeps(0.0)
        assert not nothing.keeps(0.0)
        for caller in CALLERS:
            assert everything.samples(caller, 0.0)
            assert not nothing.samples(caller, 0.0)
