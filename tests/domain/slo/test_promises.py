"""What is promised, for which part of a reply, and when it counts as kept."""

import math
import subprocess
import sys

from penstock.services.domain.slo.attainment import AttainmentTracker
from penstock.services.domain.slo.promises import PhaseTracker, Promise
from penstock.types.prompts import TextPrompt
from penstock.types.requests import GenerationRequest
from penstock.types.sampling import SamplingParams
from penstock.types.slo import Slo, SloPhase


def test_importing_the_package_loads_no_compiled_code() -> None:
    """Routers have neither numba nor numpy, and import the vocabulary of promises."""
    script = (
        "import sys, penstock.services.domain.slo; print(sorted({'numba', 'numpy', 'llvmlite'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_phase_begins_behind_its_marker_however_the_text_is_cut() -> None:
    phases = (SloPhase(0, 0.02), SloPhase(0, 0.1, "</think>"))
    for cuts in (["</think>"], ["so </th", "ink> yes"], list("abc</think>"), ["<</think>"]):
        tracker = PhaseTracker(phases)
        for text in cuts:
            assert tracker.tpot_s == 0.02
            tracker.advance(1, text)
        assert tracker.tpot_s == 0.1
    tracker = PhaseTracker(phases)
    tracker.advance(3, "</think></think>")
    tracker.advance(1, "</think>")
    assert tracker.tpot_s == 0.1


def test_phases_by_token_and_by_marker_follow_in_order() -> None:
    tracker = PhaseTracker((SloPhase(2, 0.2), SloPhase(0, 0.1, "##"), SloPhase(5, 0.05)))
    paces = []
    for text in ("##", "", "#", "#", "", "", ""):
        paces.append(tracker.tpot_s)
        tracker.advance(1, text)
    assert paces == [None, None, 0.2, 0.2, 0.1, 0.05, 0.05]  # a marker before its turn does not count
    assert Promise(None, (SloPhase(0, 0.2), SloPhase(9, 0.05))).tightest_tpot_s() == 0.05


def test_bad_markers_are_refused_by_field() -> None:
    request = GenerationRequest(
        "a", TextPrompt("x"), SamplingParams(), slo=Slo(1.0, (SloPhase(0, 0.1, "m" * 65), SloPhase(3, 0.1, "m")))
    )
    assert [p.field for p in request.problems()] == ["slo.phases[0].after_marker", "slo.phases[1].after_marker"]


def judged(times: list[float], due_s: float = 1.0, tpot_s: float = 0.1) -> tuple[bool, bool]:
    tracker = AttainmentTracker(due_s)
    for at_s in times:
        tracker.token(at_s, tpot_s)
    result = tracker.result()
    return result.first_token_late_s <= 0, result.late_windows == 0


def test_the_pace_is_judged_over_every_window_of_ten_gaps() -> None:
    """A late token is forgiven where its neighbours were early; a stall is not, whatever was early before the window."""
    even = [1.0 + 0.1 * k for k in range(40)]
    assert judged(even) == (True, True)
    late_one = [*even[:20], even[20] + 0.05, *even[21:]]
    assert judged(late_one)[1] is False  # the ten gaps before it took 1.05 s
    early = [1.0 + 0.09 * k for k in range(40)]
    assert judged([*early[:20], early[20] + 0.05, *early[21:]]) == (True, True)
    stalled = [*(0.5 + 0.01 * k for k in range(30)), *(2.0 + 0.01 * k for k in range(30))]
    assert judged(stalled)[1] is False  # far ahead of the pace on average, and still a stall of 1.2 s
    assert judged([1.0, 1.15]) == (True, False)  # fewer than ten gaps: the whole reply
    assert judged([1.0, 1.15, 1.19]) == (True, True)


def test_a_first_token_that_is_late_or_never_comes_misses() -> None:
    assert judged([1.1, 1.2]) == (False, True)
    never = AttainmentTracker(1.0).result()
    assert never.first_token_late_s == math.inf
    assert not never.attained
    assert AttainmentTracker(None).result().first_token_late_s == 0


def test_windows_do_not_reach_over_a_part_without_a_promise() -> None:
    tracker = AttainmentTracker(None)
    for at_s, tpot_s in ((0.0, None), (0.1, 0.1), (5.0, None), (9.0, None), (9.1, 0.1), (9.2, 0.1)):
        tracker.token(at_s, tpot_s)
    assert tracker.result().attained
