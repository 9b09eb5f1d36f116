"""The steps that are taken under SLOs, and the certificate that repeats them."""

import itertools
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from penstock.services.domain.latency import StepLatencyModel
from penstock.services.domain.slo.compiled import admission, replay, selection, step
from penstock.services.domain.slo.compiled.layout import (
    AGAIN,
    BEST_EFFORT,
    CONTEXT,
    COUNTS,
    DECODING,
    DUE_S,
    GONE,
    KIND,
    LEFT,
    PENDING,
    PLACED,
    RELEASE_S,
    STANDARD,
    TIMES,
    TPOT_S,
    Certificate,
    Columns,
    F,
    Kv,
    N,
    StepModel,
    step_model,
)
from penstock.services.domain.slo.compiled.replay import AdmissionQuestion

SIX_PER_UNIT = step_model(StepLatencyModel.linear(0.0, 1 / 6, 0.0), 6)
LONG = 1000
LATENCIES = (
    StepLatencyModel.linear(0.005, 1e-4, 1e-7),
    StepLatencyModel.linear(0.0, 1e-3, 0.0),
    StepLatencyModel((1.0, 64.0, 256.0, 1024.0), (0.02, 0.021, 0.05, 0.3), 3e-7, 2e-8, 1e-7),
)


def decode(due_s: float = 1.0, tpot_s: float = 1.0, left: int = LONG, context: int = 0) -> tuple[int | float, ...]:
    return STANDARD, 1, context, 1, left, 1, due_s, tpot_s, -math.inf


def prompt(
    tokens: int, due_s: float, tpot_s: float = 1.0, left: int = LONG, release_s: float = -math.inf
) -> tuple[int | float, ...]:
    return STANDARD, 0, 0, tokens, left, 0, due_s, tpot_s, release_s


def best_effort(tokens: int, decoding: bool = False) -> tuple[int | float, ...]:
    return BEST_EFFORT, int(decoding), 0, tokens, LONG, 1, math.inf, math.inf, -math.inf


def columns(*requests: tuple[int | float, ...]) -> Columns:
    counts, times = np.zeros((COUNTS, len(requests)), np.int64), np.zeros((TIMES, len(requests)))
    for i, request in enumerate(requests):
        counts[:AGAIN, i], times[:, i] = request[:AGAIN], request[AGAIN:]
    return Columns(counts, times)


def batch(
    counts: N, times: F, now_s: float = 0.0, model: StepModel = SIX_PER_UNIT, shared: int = step.NONE
) -> tuple[list[int], float]:
    grants = np.zeros(counts.shape[1], np.int64)
    took_s, _ = step.form_batch(now_s, Columns(counts, times), counts.shape[1], model, shared, False, grants)
    return grants.tolist(), took_s


def kept(
    of: Columns,
    model: StepModel,
    *,
    best_effort: bool = False,
    hold: bool = False,
    kv_tokens: float = math.inf,
    found: Certificate | None = None,
) -> bool:
    """Whether a replay of these requests passes."""
    n = of.counts.shape[1]
    found = found or Certificate(np.full(n, -np.inf), np.zeros(1))
    return bool(replay.keeps_promises(0.0, of, n, model, best_effort, hold, Kv(float(kv_tokens), 0), found))


def decided(
    running: Columns, new: Columns, model: StepModel = SIX_PER_UNIT, now_s: float = 0.0, kv_tokens: float = np.inf
) -> tuple[list[int], F]:
    accepted, n = np.zeros(new.counts.shape[1], np.int64), running.counts.shape[1]
    found = Certificate(np.full(n + len(accepted), -np.inf), np.full(1, np.inf))
    tpots = np.unique(np.concatenate([running.times[TPOT_S], new.times[TPOT_S]]))
    asked = AdmissionQuestion(now_s, running, n, new, model, Kv(float(kv_tokens), 0))
    admission.decide(asked, tpots, accepted, found)
    return accepted.tolist(), found.release_s


def run_until(
    counts: N, times: F, until_s: float, model: StepModel = SIX_PER_UNIT
) -> tuple[dict[int, float], list[float]]:
    """Take steps; when each request's first token came, and by how much every token was late (0 for in time)."""
    now_s, first, late = 0.0, dict[int, float](), list[float]()
    while now_s < until_s - 1e-9:
        grants, took_s = batch(counts, times, now_s, model)
        now_s += took_s
        for i, count in enumerate(grants):
            if count and count == counts[PENDING, i]:
                late.append(max(0.0, now_s - times[DUE_S, i]))
                if not counts[DECODING, i]:
                    first[i] = now_s
        step.commit(now_s, counts, times, counts.shape[1], np.array(grants))
    return first, late


def test_figure_3_three_of_four_are_admitted_and_every_promise_is_kept() -> None:
    """6 tokens per unit, three decodes, four prompts of 6, first token within 6 units, a token per unit."""
    running, new = columns(*[decode()] * 3), columns(*[prompt(6, 6.0)] * 4)
    accepted, release_s = decided(running, new)
    assert accepted == [1, 1, 1, 0]
    counts, times = columns(*[decode()] * 3, *[prompt(6, 6.0)] * 3)
    times[RELEASE_S] = release_s[:6]
    first, late = run_until(counts, times, 30.0)
    assert first == {3: pytest.approx(6.0), 4: pytest.approx(6.0), 5: pytest.approx(6.0)}
    assert max(late) < 1e-6


def test_f4_prompts_that_complete_early_break_what_others_were_promised() -> None:
    """Three prompts fit by their budget, but completed as early as can be their decodes delay the third to unit 11.

    The certificate finds that, and admits the three with prompts that complete as late as they may.
    """
    counts, times = columns(*[decode()] * 3, *[prompt(6, 6.0)] * 3)
    found = Certificate(np.zeros(6), np.zeros(1))
    assert not kept(Columns(counts, times), SIX_PER_UNIT)
    assert kept(Columns(counts, times), SIX_PER_UNIT, hold=True, found=found)
    assert found.release_s[3:].tolist() == pytest.approx([5.0] * 3)
    times[DUE_S, 5] = 100.0  # what happens to the third: nobody waits for it
    first, _ = run_until(counts, times, 12.0)
    assert [first[i] for i in (3, 4, 5)] == pytest.approx([2.0, 5.0, 11.0])


def test_f4_a_prompt_completes_early_where_the_certificate_holds() -> None:
    """With room to spare nobody is held: the first token comes as early as it can."""
    accepted, release_s = decided(columns(decode()), columns(prompt(5, 6.0), prompt(4, 6.0)))
    assert accepted == [1, 1]
    assert release_s.tolist() == [-math.inf, 0.0, 1.0]


def test_f2_a_token_is_in_the_step_if_it_is_due_before_the_next_one_ends() -> None:
    """Algorithm 2, line 9, prints `schDDL >= i t0`: that would serve exactly those that can wait.

    Paces of 1 and 2 units: the loose decode waits for the step after this one only as long as it is in time there.
    """
    tight, loose = decode(1.0, 1.0), decode(2.0, 2.0)
    counts, times = columns(tight, tight, loose, loose, prompt(100, 50.0))
    assert batch(counts, times)[0] == [1, 1, 1, 0, 3]  # half of the loose ones' share of this step
    times[DUE_S, 2:4] = 1.5  # due before a second step could end
    assert batch(counts, times)[0] == [1, 1, 1, 1, 2]
    times[DUE_S, 2:4] = (2.5, 2.0)
    assert batch(counts, times)[0] == [1, 1, 0, 1, 3]  # by earliest deadline


def test_loose_paces_take_their_share_and_no_more() -> None:
    """Decodes at half the pace cost half the tokens, step after step, and none is ever late."""
    counts, times = columns(*[decode(1.0, 1.0)] * 2, *[decode(2.0, 2.0)] * 4, prompt(1000, 1e6))
    _, late = run_until(counts, times, 20.0)
    assert max(late) < 1e-6
    assert counts[CONTEXT, 6] == pytest.approx(20 * (6 - 2 - 2), abs=2)


def test_the_batch_is_the_largest_that_the_paces_allow() -> None:
    """The step's size follows the requests that run, not a fixed cap (section 3.2.2)."""
    model = step_model(StepLatencyModel.linear(0.01, 0.0001, 0.0), 4096)
    for tpot_s, tokens in ((0.05, 400), (0.1, 900), (0.2, 1900)):
        counts, times = columns(decode(tpot_s, tpot_s), prompt(5000, 100.0))
        grants, took_s = batch(counts, times, model=model)
        assert sum(grants) == tokens
        assert took_s == pytest.approx(tpot_s)
    assert sum(batch(*columns(prompt(5000, 100.0)), model=model)[0]) == 4096


def test_prompts_go_by_deadline_and_a_completed_one_ends_the_step_in_time() -> None:
    counts, times = columns(prompt(3, 3.0), prompt(2, 0.5), prompt(1, 9.0))
    grants, took_s = batch(counts, times, model=SIX_PER_UNIT)
    assert grants[1] == 2
    assert took_s <= 0.5
    counts, times = columns(prompt(30, 9.0), prompt(30, 8.0))
    assert batch(counts, times)[0] == [0, 6]


def test_best_effort_takes_what_is_left_and_a_reserve_where_there_is_one() -> None:
    counts, times = columns(decode(), best_effort(1, decoding=True), best_effort(100))
    assert batch(counts, times, shared=step.PRESENT)[0] == [1, 1, 4]
    counts, times = columns(decode(), best_effort(100), prompt(100, 50.0))
    assert batch(counts, times, shared=step.PRESENT)[0] == [1, 0, 5]
    reserving = SIX_PER_UNIT._replace(reserve=1 / 3)
    assert batch(counts, times, model=reserving, shared=step.PRESENT)[0] == [1, 2, 3]
    times[DUE_S, 2] = 1.5  # cannot wait: it may borrow the reserve
    assert batch(counts, times, model=reserving, shared=step.PRESENT)[0] == [1, 0, 5]
    assert batch(counts, times, model=reserving, shared=step.ASSUMED)[0] == [1, 0, 3]


def test_a_lagging_decode_goes_alone_rather_than_not_at_all() -> None:
    """What is late already is computed at once, with nothing beside it that would make it later."""
    counts, times = columns(decode(-0.5), decode(0.1), prompt(50, 100.0))
    assert batch(counts, times)[0] == [1, 1, 0]


def test_nobody_is_admitted_beside_requests_that_are_late_already() -> None:
    running, new = columns(prompt(100, 1.0)), columns(prompt(1, 50.0))
    assert decided(running, new)[0] == [0]


def most_held(counts: N, times: F, model: StepModel) -> int:
    """The reference of what a certificate says of KV: take every step, and count what the requests hold in each."""
    now_s, most = 0.0, 0
    while (counts[KIND] == STANDARD).any():
        grants, took_s = batch(counts, times, now_s, model)
        now_s += took_s
        held = 0
        for i, count in enumerate(grants):
            if counts[KIND, i] == STANDARD and (counts[PLACED, i] or count):
                held += int(counts[CONTEXT, i] + (count if counts[DECODING, i] else counts[PENDING, i]))
        most = max(most, held)
        step.commit(now_s, counts, times, counts.shape[1], np.array(grants))
        counts[KIND, counts[LEFT] == 0] = GONE
    return most


def test_the_certificate_knows_the_most_kv_that_is_held_at_any_time() -> None:
    """The same as counting it step by step; with a token less, the certificate fails."""
    passed = 0
    for seed in range(80):
        rng = random.Random(seed)
        latency = rng.choice(LATENCIES[:2])
        model = step_model(latency, rng.choice([64, 512]))
        paces = rng.sample([0.03, 0.05, 0.07, 0.1], rng.randint(1, 3))
        requests = [
            decode(pace, pace, rng.randint(1, 80), rng.randint(0, 300))
            for pace in (rng.choice(paces) for _ in range(rng.randint(0, 12)))
        ]
        requests += [
            prompt(rng.randint(1, 300), rng.choice([0.2, 0.5, 2.0]), rng.choice(paces), rng.randint(1, 80))
            for _ in range(rng.randint(1, 5))
        ]
        of = columns(*requests)
        found = Certificate(np.zeros(len(requests)), np.zeros(1))
        if not kept(of, model, found=found):
            continue
        passed += 1
        most = most_held(of.counts.copy(), of.times.copy(), model)
        assert found.most_held[0] == most, seed
        assert kept(of, model, kv_tokens=most), seed
        assert not kept(of, model, kv_tokens=most - 1), seed
    assert passed > 50


def test_kv_that_others_give_back_in_time_is_promised() -> None:
    """A reply that ends soon and one that begins hold less together than the sum of their lengths."""
    running, new = columns(decode(left=10, context=90)), columns(prompt(20, 10.0, left=80))
    assert decided(running, new, kv_tokens=130)[0] == [1], "although both need 100 tokens of KV"
    assert decided(running, new, kv_tokens=108)[0] == [0]


def test_a_burst_for_which_there_is_kv_for_few_is_decided_on_within_the_replays() -> None:
    """Sixty prompts, KV for five: a set of sixty fails, and so do those of nearly as many."""
    model = step_model(StepLatencyModel.linear(0.001, 1e-5, 0.0), 512)
    burst = columns(*[prompt(100, 10.0, 0.1, left=900) for _ in range(60)])
    accepted, _ = decided(columns(), burst, model, kv_tokens=5_000)
    assert sum(accepted) == 5


def certified(requests: Sequence[tuple[int | float, ...]], model: StepModel) -> bool:
    """Whether the requests keep their promises with the release times of one replay."""
    of = columns(*requests)
    return any(kept(of, model, hold=hold) for hold in (False, True))


def test_as_many_are_admitted_as_in_any_certified_set() -> None:
    """Over seeded loads up to and beyond what can be kept, a larger certified set than the one admitted is rare.

    The program counts decodes at their pace and knows nothing of slack (`step.next_due_s`), so a set may be certified that it
    rules out: 3 of 560.
    """
    declined = judged = fewer = 0
    for seed in range(200):
        rng = random.Random(seed)
        latency = rng.choice(LATENCIES)
        model = step_model(latency, rng.choice([64, 512]))
        paces = rng.sample([0.03, 0.05, 0.07, 0.1], rng.randint(1, 3))
        running = []
        for _ in range(rng.randint(1, 60)):
            pace = rng.choice(paces)
            running.append(decode(pace, pace, rng.randint(5, 100), rng.randint(0, 500)))
        if not certified(running, model):
            continue
        longest = rng.choice([100, 400, 1500])
        new = [
            prompt(
                rng.randint(5, longest), rng.choice([0.1, 0.2, 0.5, 1.0, 2.0]), rng.choice(paces), rng.randint(1, 60)
            )
            for _ in range(rng.randint(1, 6))
        ]
        accepted, _ = decided(columns(*running), columns(*new), model)
        assert certified([*running, *itertools.compress(new, accepted)], model), seed
        larger = itertools.combinations(new, sum(accepted) + 1)
        fewer += any(certified([*running, *some], model) for some in larger)
        judged += 1
        declined += sum(accepted) < len(new)
    assert judged > 130
    assert declined > 30
    assert fewer <= judged // 50


def test_a_prompt_that_would_be_late_next_to_the_decodes_goes_before_them_where_they_can_wait() -> None:
    """Six tokens per unit, decodes due in 3 units, a prompt of six due in one: alone it is in time, and so are they."""
    counts, times = columns(*[decode()] * 3, prompt(6, 1.0))
    times[DUE_S, :3], times[TPOT_S, :3] = 3.0, 3.0
    grants, took_s = batch(counts, times, 0.0)
    assert grants == [0, 0, 0, 6]
    assert took_s == pytest.approx(1.0)
    times[DUE_S, 3] = 2.0  # in time next to them
    assert batch(counts, times, 0.0)[0][0] == 1
    times[DUE_S, 3], times[DUE_S, :3] = 1.0, 1.2  # the decodes cannot wait
    assert batch(counts, times, 0.0)[0][:3] == [1, 1, 1]


def test_the_kth_smallest_is_what_sorting_puts_there() -> None:
    """Also among ties and infinities."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        values = rng.choice([*rng.normal(size=6), math.inf, 0.0], size=int(rng.integers(1, 40)))
        k = int(rng.integers(len(values)))
        assert selection.kth_smallest(values.copy(), k) == np.sort(values)[k]


def test_the_kth_earliest_is_what_sorting_puts_there() -> None:
    """Also among ties, infinities, times that are nearly equal, and columns after those that count."""
    rng = np.random.default_rng(4)
    for _ in range(200):
        some = [*rng.normal(size=5), 0.0, 1.0, 1.0 + 1e-12, math.inf if rng.random() < 0.3 else 2.0]
        values = rng.choice(some, size=int(rng.integers(1, 60)))
        count = int(rng.integers(1, len(values) + 1))
        k = int(rng.integers(count))
        found = selection.kth_earliest(values, count, k, float(values[:count].min()))
        assert found == np.sort(values[:count])[k]


def replayed(counts: N, times: F, model: StepModel, best_effort: bool, hold: bool) -> tuple[bool, dict[int, float]]:
    """The reference of a replay: step after step to the last token, on all columns; when each prompt's last step began."""
    n, now_s, released = counts.shape[1], 0.0, dict[int, float]()
    grants = np.zeros(n, np.int64)
    while (counts[KIND] == STANDARD).any():
        prompts = ((counts[KIND] == STANDARD) & (counts[DECODING] == 0)).any()
        shared = step.ASSUMED if best_effort and prompts else step.NONE
        took_s, cap_s = step.form_batch(now_s, Columns(counts, times), n, model, shared, hold, grants)
        assert took_s > 0
        if shared == step.ASSUMED:
            took_s = max(took_s, min(cap_s, took_s / (1 - model.reserve)))
        end_s = now_s + took_s
        for i in np.flatnonzero(counts[KIND] == STANDARD):
            goes_on = 0 < grants[i] < counts[PENDING, i]
            if not goes_on and times[DUE_S, i] < end_s - 1e-9:
                return False, released
            if grants[i] == counts[PENDING, i] and not counts[DECODING, i]:
                released[int(i)] = now_s
        step.commit(end_s, counts, times, n, grants)
        counts[KIND, (counts[LEFT] <= 0) | (counts[KIND] == BEST_EFFORT)] = GONE
        now_s = end_s
    return True, released


def test_a_replay_on_columns_without_gaps_is_that_of_all_columns_to_the_last_token() -> None:
    """Verdict and release times, with best effort and without, prompts early and late, among gaps of every kind."""
    verdicts = dict.fromkeys(itertools.product((False, True), repeat=3), 0)
    for seed in range(150):
        rng = random.Random(seed)
        latency = rng.choice(
            [
                StepLatencyModel.linear(0.005, 1e-4, 1e-7),
                StepLatencyModel((1.0, 8.0, 16.0, 256.0), (0.02, 0.022, 0.021, 0.05), 3e-7, 2e-8, 1e-7),
            ]
        )
        model = step_model(latency, rng.choice([64, 512]), rng.choice([0.0, 0.1]), places=rng.choice([12, 50]))
        paces = rng.sample([0.03, 0.05, 0.07, 0.1, math.inf], rng.randint(1, 3))
        requests: list[tuple[int | float, ...]] = []
        for _ in range(rng.randint(1, 25)):
            pace = rng.choice(paces)
            kind = rng.random()
            if kind < 0.5 and pace < math.inf:
                requests.append(decode(rng.uniform(0.6, 1.4) * pace, pace, rng.randint(1, 40), rng.randint(0, 300)))
            elif kind < 0.8:
                requests.append(prompt(rng.randint(1, 300), rng.choice([0.1, 0.3, 1.0]), pace, rng.randint(1, 40)))
            else:
                requests.append(best_effort(rng.randint(1, 50), rng.random() < 0.5))
        for uses, hold in itertools.product((False, True), repeat=2):
            counts, times = columns(*requests)
            alone = counts.copy()
            alone[KIND, alone[KIND] == BEST_EFFORT] = GONE
            expected, released = replayed(alone, times.copy(), model, uses, hold)
            found = Certificate(np.full(len(requests), -math.inf), np.zeros(1))
            passes = kept(Columns(counts, times), model, best_effort=uses, hold=hold, found=found)
            assert passes is expected, seed
            if expected:
                assert {i: s for i, s in enumerate(found.release_s.tolist()) if s > -math.inf} == pytest.approx(
                    released
                )
            verdicts[uses, hold, expected] += 1
    assert min(verdicts.values()) > 20, verdicts
