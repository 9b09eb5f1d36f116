"""The picture of the mesh: newest record wins, leases end, an outage of the store freezes it."""

import random
from dataclasses import replace

from penstock.services.domain.instances import InstanceRecord, Load, ModelCard, Role
from penstock.services.domain.mesh_view import MeshView
from penstock.types.mesh_status import Loading
from penstock.types.plans import Plan, TierPlan

CARD = ModelCard("small", "m", "d", "torch", 100, 10, 16, 8)
WORKER = InstanceRecord("w1", Role.WORKER, "host:1", 1.0, 1, 3.0, model=CARD, load=Load((5,), (), 9, 1.0))
PLAN = Plan(1, (TierPlan("small", "m", None, 1),), source="test", created_at=10.0)


def connected(now: float = 0.0) -> MeshView:
    view = MeshView()
    view.connect([WORKER], PLAN, now)
    return view


def test_a_newer_record_replaces_an_older_one_and_never_the_other_way() -> None:
    view = connected()
    newer = replace(WORKER, sequence=5, draining=True)
    assert view.hear(newer, 1.0)
    assert not view.hear(WORKER, 1.1)
    assert view.instances() == [newer]
    assert view.workers("small") == []  # it drains
    restarted = replace(WORKER, epoch=2.0, sequence=1)
    assert view.hear(restarted, 1.2)
    assert view.workers("small") == [restarted]


def test_instances_are_in_order_of_their_ids_in_whatever_order_they_come_and_go() -> None:
    view, draw, known = MeshView(), random.Random(1), set[str]()
    view.connect([], PLAN, 0.0)
    for number in draw.sample(range(1000), 200):
        view.hear(replace(WORKER, instance_id=f"w{number}"), 0.0)
        known.add(f"w{number}")
        if number % 3 == 0:
            gone = draw.choice(sorted(known))
            view.forget(gone)
            known.remove(gone)
        if number % 2 == 0:
            assert [record.instance_id for record in view.workers("small")] == sorted(known)
    assert [record.instance_id for record in view.instances()] == sorted(known)


def test_a_worker_that_loads_is_no_instance_yet() -> None:
    """It is known until it serves, or its lease ends, also where others are kept."""
    view = MeshView(keep_expired={Role.WORKER})
    view.connect([], PLAN, 0.0)
    far = Load(loading=Loading(0.4, 30.0))
    record = InstanceRecord("loading-w1", Role.WORKER, "host:1", 1.0, 1, 3.0, load=far, tier="small")
    view.hear(record, 0.0)
    assert (view.instances(), view.workers("small")) == ([], [])
    assert (view.loading(), view.loading("small"), view.loading("large")) == ([record], [record], [])
    view.hear(WORKER, 1.0)
    assert (view.workers("small"), view.loading()) == ([WORKER], [])
    view.forget("w1")
    view.alive(4.0)
    assert view.expire() == ["loading-w1"]
    assert (view.loading(), view.expired()) == ([], [])


def test_nothing_expires_while_the_store_is_away_and_a_lease_begins_anew_when_it_is_back() -> None:
    view = connected()
    view.disconnect(1.0)
    assert view.expire() == []
    assert view.age_s(31.0) == 30.0
    view.connect([], None, 100.0)  # it came back empty
    assert view.workers("small") == [WORKER]
    assert view.plan == PLAN
    view.alive(102.9)
    assert view.expire() == []
    view.alive(103.1)
    assert view.expire() == ["w1"]


def test_a_stuck_store_lets_nobody_expire() -> None:
    """Instances publish into a store that no longer answers: their silence here says nothing of them."""
    view = connected()
    view.alive(1.0)
    assert view.expire() == []  # however late it is: the store was last heard at 1.0


def test_a_process_that_stood_still_gives_everybody_a_whole_lease() -> None:
    view = connected()
    view.woke(60.0)
    assert view.expire() == []
    view.alive(62.9)
    assert view.expire() == []
    view.alive(63.1)
    assert view.expire() == ["w1"]
    view.disconnect(64.0)
    view.woke(100.0)
    assert not view.connected


def test_the_plan_only_moves_forward() -> None:
    view = connected()
    assert not view.follow(PLAN)
    newer = replace(PLAN, revision=2)
    assert view.follow(newer)
    assert not view.follow(PLAN)
    # planner and store lost everything: revisions begin anew, later in time
    reborn = replace(PLAN, created_at=20.0)
    assert view.follow(reborn)
    assert view.plan == reborn


def test_workers_are_those_of_the_tier() -> None:
    view = connected()
    view.hear(replace(WORKER, instance_id="w0"), 0.0)
    view.hear(replace(WORKER, instance_id="w2", model=replace(CARD, tier="large")), 0.0)
    view.hear(InstanceRecord("j", Role.JUDGE, "host:2", 1.0, 1, 3.0), 0.0)
    assert [r.instance_id for r in view.workers("small")] == ["w0", "w1"]
    assert [r.instance_id for r in view.instances(Role.JUDGE)] == ["j"]


def test_a_view_that_keeps_expired_instances_knows_them_apart() -> None:
    """They are neither listed nor given requests like the others; a new record is a new lease."""
    view = MeshView(keep_expired={Role.WORKER})
    judge = InstanceRecord("j", Role.JUDGE, "host:2", 1.0, 1, 3.0)
    view.connect([WORKER, judge], PLAN, 0.0)
    view.alive(3.1)
    assert sorted(view.expire()) == ["j", "w1"]
    assert view.expire() == []  # told once
    assert (view.instances(), view.workers("small")) == ([], [])
    assert view.expired() == view.expired_workers("small") == [WORKER]  # the judge's role is not kept
    assert (view.expired_workers("large"), view.find("w1"), view.find("j")) == ([], WORKER, None)
    newer = replace(WORKER, sequence=2)
    assert view.hear(newer, 4.0)
    assert (view.workers("small"), view.expired()) == ([newer], [])
    view.alive(7.1)
    assert view.expire() == ["w1"]
    view.connect([newer], PLAN, 8.0)  # the store holds its record still: so does its lease
    assert (view.workers("small"), view.expired()) == ([newer], [])


def test_an_expired_instance_gives_way_to_whoever_has_its_address_now() -> None:
    view = MeshView(keep_expired={Role.WORKER})
    view.connect([WORKER], PLAN, 0.0)
    view.alive(3.1)
    view.expire()
    view.hear(replace(WORKER, instance_id="w2", address="host:9"), 4.0)
    assert view.expired() == [WORKER]
    restarted = replace(WORKER, instance_id="w3")
    view.hear(restarted, 4.0)
    assert view.expired() == []
    assert view.find("w1") is None
    assert restarted in view.workers("small")


def test_an_expired_draining_worker_takes_no_requests() -> None:
    view = MeshView(keep_expired={Role.WORKER})
    view.connect([replace(WORKER, draining=True)], PLAN, 0.0)
    view.alive(3.1)
    view.expire()
    assert view.expired_workers("small") == []
    assert len(view.expired(Role.WORKER)) == 1


def test_a_record_without_a_load_takes_none_away_from_the_same_version() -> None:
    """A worker reads the load of some instances, and of all which places they serve."""
    head = replace(WORKER, load=None)
    view = MeshView()
    view.connect([], None, 0.0)
    assert view.hear(head, 0.0)
    assert view.hear(WORKER, 0.0), "the load is new"
    assert not view.hear(head, 0.0)
    assert not view.hear(WORKER, 0.0)
    assert view.instances() == [WORKER]
    newer = replace(head, sequence=WORKER.sequence + 1)
    assert view.hear(newer, 0.0)
    assert not view.hear(WORKER, 0.0), "a load of before"
    assert view.instances() == [newer]
