"""A worker's view of its stage: pure, with records and time handed in."""

from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.services.domain.stages.bidding import Go, Sender, TransferSlots
from penstock.services.domain.stages.places import MAX_NEIGHBOURS
from penstock.types.mesh_status import StagePlace
from penstock.types.plans import Plan, QoeModel, Stage, TierPlan
from penstock.types.workers import MoveAdvice, MoveReason
from penstock.worker_service.stages.stage_tracker import ADVICE_PAUSE_S, StageTracker

CARD = ModelCard("only", "m", "d", "torch", 1000, 100, 16, 8)
STAGES = (Stage(0, 100, 2), Stage(100, 400, 1))
FIRST, LAST = StagePlace(0, 0, 100), StagePlace(1, 100, 400)
QOE = QoeModel(0.0, 0.0, 0.0, 0.0, 1.0)


class Tier:
    """A worker named `me` among others."""

    def __init__(self, stages: tuple[Stage, ...] = STAGES, refine_s: float = 1e9, move_s: float | None = None) -> None:
        self.view, self.sender = MeshView(), Sender(TransferSlots())
        instances = sum(stage.instances for stage in stages) or 3
        plan = Plan(1, (TierPlan("only", "m", None, instances, stages, QOE if stages else None),))
        self.view.connect([], plan, 0.0)
        self.tracker = StageTracker("me", "only", self.view, self.sender, refine_s=refine_s, move_s=lambda _: move_s)
        self._sequence = 0

    def hear(self, name: str, place: StagePlace | None, *running: int) -> None:
        self._sequence += 1
        load = Load(running, (), 50, 1.0, tuple(1 for _ in running))
        record = InstanceRecord(name, Role.WORKER, "h", 1.0, self._sequence, 3.0, model=CARD, load=load, place=place)
        self.view.hear(record, 0.0)

    def look(self, *running: int, now: float = 0.0) -> StagePlace | None:
        self.tracker.look(Load(running, (), 50, 1.0, tuple(1 for _ in running)), now)
        return self.tracker.place


def between(a: tuple[int, ...] = (), z: tuple[int, ...] = (), **options: float | None) -> Tier:
    """A worker beside one of the first stage and one of the last, with requests of these lengths."""
    tier = Tier(**options)  # type: ignore[arg-type]
    tier.hear("a", FIRST, *a)
    tier.hear("z", LAST, *z)
    return tier


def test_without_stages_nothing_moves() -> None:
    tier = Tier(stages=())
    tier.hear("other", None)
    assert tier.look(5000, 5000) is None
    tier.tracker.grew("r", 5000)
    assert tier.tracker.advice("r", 0.0) is None


def test_a_place_is_taken_beside_those_that_are_taken() -> None:
    tier = Tier()
    tier.hear("a", FIRST)
    tier.hear("b", FIRST)
    assert tier.look() == LAST
    tier.tracker.grew("r", 5000)
    assert tier.tracker.advice("r", 0.0) is None, "the last stage keeps what is longer than all"
    tier.view.forget("b")
    tier.hear("c", None)
    assert tier.look() == LAST, "the newcomer closes the gap"


def test_a_request_that_has_outgrown_its_range_should_move_and_is_named_again_after_a_pause() -> None:
    tier = between()
    assert tier.look() == FIRST
    tier.tracker.grew("r", 99)
    assert tier.tracker.advice("r", 0.0) is None
    tier.tracker.grew("r", 100)
    assert tier.tracker.advice("r", 0.0) == MoveAdvice(MoveReason.RANGE_CROSSED, 100, 100)
    tier.tracker.grew("q", 120)
    assert tier.tracker.advice("q", 0.5) == MoveAdvice(MoveReason.RANGE_CROSSED, 120, 220), "with all that waits to go"
    tier.tracker.grew("r", 101)
    assert tier.tracker.advice("r", ADVICE_PAUSE_S / 2) is None
    assert tier.tracker.advice("r", ADVICE_PAUSE_S) == MoveAdvice(MoveReason.RANGE_CROSSED, 101, 221)
    tier.tracker.left("q")
    assert tier.sender.tokens == 101


def test_an_overloaded_outlier_hands_over_one_request_at_a_time() -> None:
    tier = between(a=(20,), z=(5,))
    for name, tokens in (("r", 90), ("s", 50), ("t", 20)):
        tier.tracker.grew(name, tokens)
    tier.look(90, 50, 20)  # 160 against an average of 90: 70 too many
    assert tier.tracker.advice("r", 0.0) is None, "it would take the sender below the average"
    assert tier.tracker.advice("t", 0.0) is None
    assert tier.tracker.advice("s", 0.0) == MoveAdvice(MoveReason.OVERLOADED, 50, 50)
    tier.look(90, 50, 20)  # what is offered counts no longer: 110 against 65
    assert tier.tracker.advice("t", 0.0) == MoveAdvice(MoveReason.OVERLOADED, 20, 70)
    tier.look(90, 20)
    assert tier.tracker.advice("r", 0.0) is None


def test_an_instance_that_is_no_outlier_hands_over_nothing() -> None:
    tier = between(a=(90,), z=(5,))
    tier.tracker.grew("s", 30)
    tier.look(30, 80)
    assert tier.tracker.advice("s", 0.0) is None, "110 against an average of 100"


def test_the_boundary_is_refined_now_and_then_and_stays_between_its_neighbours() -> None:
    tier = between(z=(300, 350, 390), refine_s=5.0)
    own = (40, 50, 60)
    assert tier.look(*own) == FIRST
    assert tier.look(*own, now=4.9) == FIRST
    assert tier.look(*own, now=5.0) == StagePlace(0, 0, 175), (
        "three tenths of the way to 350: 4 * 450 + 2 * 740 is the least"
    )
    assert tier.look(*own, now=9.9) == StagePlace(0, 0, 175)
    for i in range(60):
        place = tier.look(*own, now=10.0 + 5 * i)
    assert place == StagePlace(0, 0, 350)
    tier.hear("z", LAST, 300)
    assert tier.look(now=500.0) == StagePlace(0, 0, 350), "frozen in thin traffic"


def test_what_is_being_sent_is_not_withdrawn() -> None:
    tier = between()
    tier.look()
    tier.tracker.grew("r", 100)
    tier.tracker.advice("r", 0.0)
    assert tier.sender.start("r") is Go.NOW
    tier.tracker.left("r")
    assert tier.sender.transmitting == "r", "until the transfer itself has ended"


def test_a_move_is_advised_only_where_it_saves_more_than_it_takes() -> None:
    """The request has 100 of 110 tokens as its output; QOE costs the tokens of a batch times its requests."""
    takes_s: list[float | None] = [1e9]
    tier = between(z=(50,))
    tier.tracker = StageTracker("me", "only", tier.view, tier.sender, refine_s=1e9, move_s=lambda _: takes_s[0])
    tier.look(110, 60, 60)
    tier.tracker.grew("r", 110, 10)
    assert tier.tracker.advice("r", 0.0) is None, "the transfer takes too long"
    takes_s[0] = 1.0
    assert tier.tracker.advice("r", ADVICE_PAUSE_S / 2) is None, "not looked at again at once"
    advice = tier.tracker.advice("r", ADVICE_PAUSE_S)
    assert advice is not None
    assert advice.reason is MoveReason.RANGE_CROSSED
    tier.hear("z", LAST, *[390] * 9)
    tier.look(110, 60, 60)
    assert tier.tracker.advice("r", 2 * ADVICE_PAUSE_S) is None, "it would be worse off there"
    takes_s[0] = None
    assert tier.tracker.advice("r", 3 * ADVICE_PAUSE_S) is not None, "while the time is not known"
    tier.tracker.draining, takes_s[0] = True, 1e9
    advice = tier.tracker.advice("r", 4 * ADVICE_PAUSE_S)
    assert advice is not None, "a worker that drains asks for no gain"
    assert advice.reason is MoveReason.DRAINING


def test_a_worker_asks_for_the_load_of_its_neighbours_only() -> None:
    tier = Tier(stages=())
    tier.look()
    assert tier.tracker.sample() == [], "without stages there is nothing to compare"
    tier = Tier()
    for i in range(100):
        tier.hear(f"w{i}", StagePlace(i % 2, 100 * (i % 2), 100))
    tier.look()
    samples = [set(tier.tracker.sample()) for _ in range(20)]
    assert {len(sample) for sample in samples} == {MAX_NEIGHBOURS}
    assert len(set().union(*samples)) > MAX_NEIGHBOURS


def test_instances_whose_load_is_not_known_count_neither_as_idle_nor_against_a_move() -> None:
    tier = Tier(refine_s=0.0, move_s=1e9)
    tier.hear("a", FIRST)
    tier.view.hear(InstanceRecord("z", Role.WORKER, "h", 1.0, 1, 3.0, model=CARD, place=LAST), 0.0)
    lengths = [10, 20, 30, 60, 70, 80, 90]
    tier.look(*lengths)
    assert tier.look(*lengths, now=10.0) == FIRST, "there is nothing to refine the boundary by"
    tier.tracker.grew("r", 120, 20)
    assert tier.tracker.advice("r", 10.0) is not None
    tier.hear("z", LAST)
    assert tier.look(*lengths, now=20.0) != FIRST
    assert tier.tracker.advice("r", 20.0) is None, "a move that takes so long does not pay"
