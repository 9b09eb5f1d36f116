"""The three state machines of a move, run against each other through every order of messages, losses and deaths.

A model of the whole: source, target and router, each as the machine that serves, joined by queues that keep their order and
may break at any message; each party may die, and the client may leave, at any point. All reachable states are visited.
"""

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.router_service.migration import moves
from penstock.router_service.migration.moves import MoveEvent, Reading
from penstock.types.workers import (
    ChunkReceived,
    KvChunk,
    KvLayout,
    NotMoved,
    TransferAccepted,
    TransferClosing,
    TransferCommitted,
    TransferFailed,
    TransferOpening,
)
from penstock.worker_service.migration import source as outgoing
from penstock.worker_service.migration import target as incoming
from penstock.worker_service.migration.source import SourcePhase, SourceState
from penstock.worker_service.migration.target import TargetPhase

CHUNK = 2  # blocks
OPENING = TransferOpening("t", KvLayout("m", 1, 1, 1, 1, "float32"), ())
WHOLE = 5  # blocks at first, of which PRESENT are at the target; each round finds one more


@dataclass(frozen=True)
class World:
    """s, t, r: whether the process lives. *_runs: the engine computes the request. Queues: oldest first; None is broken."""

    present: int
    grown: int = 0
    source: SourceState = SourceState()  # noqa: RUF009 -- frozen
    target: TargetPhase = TargetPhase.AWAITING
    reading: Reading = Reading.MOVING
    s: bool = True
    t: bool = True
    r: bool = True
    s_runs: bool = True  # decodes
    s_has: bool = True  # decodes or is stopped, its stream to the router open
    t_runs: bool = False
    reserved: bool = False
    claim: bool = True  # the router's stream at the target, seen from the target
    anew: bool = False
    s_inbox: tuple[object, ...] = ()
    t_inbox: tuple[object, ...] = ()
    to_target: tuple[object, ...] | None = (OPENING,)
    to_source: tuple[object, ...] | None = ()
    source_stream: tuple[MoveEvent, ...] | None = ()
    target_stream: tuple[MoveEvent, ...] | None = ()
    word: tuple[MoveEvent, ...] | None = ()


def add(queue: tuple[object, ...] | None, item: object) -> tuple[object, ...] | None:
    return None if queue is None else (*queue, item)


def source_does(w: World, event: outgoing.SourceEvent) -> World:
    state, effects = outgoing.advance(w.source, event, CHUNK)
    if state.phase is SourcePhase.FAILED and not w.source.over:  # the stream is closed
        w = replace(w, to_target=None, to_source=None, t_inbox=(*w.t_inbox, incoming.SourceLost()))
    w = replace(w, source=state)
    for effect in effects:
        match effect:
            case outgoing.Measure():
                if not w.s_has:
                    w = replace(w, s_inbox=(*w.s_inbox, TransferFailed("gone")))
                    continue
                blocks = WHOLE + w.grown
                w = replace(w, grown=min(w.grown + 1, 3), s_inbox=(*w.s_inbox, outgoing.Measured(blocks)))
            case outgoing.SendChunk(first, count):
                assert 0 < count <= CHUNK
                assert first >= w.present
                w = replace(w, to_target=add(w.to_target, KvChunk(first, count)))
            case outgoing.StopAndSendRest():
                if not w.s_has:
                    w = replace(w, s_inbox=(*w.s_inbox, TransferFailed("gone")))
                    continue
                w = replace(w, s_runs=False, to_target=add(w.to_target, TransferClosing(())))
            case outgoing.Delete():
                if w.s_has:
                    stream = add(w.source_stream, MoveEvent.SOURCE_HANDED_OVER)
                    w = replace(w, s_has=False, source_stream=stream)  # type: ignore[arg-type]
            case outgoing.Resume():
                w = replace(w, s_runs=w.s_has)
            case NotMoved():
                w = replace(w, word=add(w.word, MoveEvent.MOVE_FAILED))  # type: ignore[arg-type]
            case outgoing.TellRound():
                pass
    return w


def target_does(w: World, event: incoming.TargetEvent) -> World:
    phase, effects = incoming.advance(w.target, event)
    w = replace(w, target=phase)
    for effect in effects:
        match effect:
            case incoming.Reserve():
                w = replace(w, reserved=True, to_source=add(w.to_source, TransferAccepted(w.present)))
            case incoming.Write(chunk):
                w = replace(w, to_source=add(w.to_source, ChunkReceived(chunk.blocks)))
            case incoming.Enter():
                assert w.reserved
                came = incoming.Entered() if w.claim else incoming.RouterLost()
                w = replace(w, reserved=False, t_runs=True, t_inbox=(came, *w.t_inbox))
            case incoming.TellCommitted():
                w = replace(w, to_source=add(w.to_source, TransferCommitted()))
                w = replace(w, target_stream=add(w.target_stream, MoveEvent.TARGET_ADMITTED))  # type: ignore[arg-type]
            case incoming.Release():
                w = replace(w, reserved=False)
            case incoming.Abort():
                w = replace(w, t_runs=False)
            case TransferFailed():
                w = replace(w, to_source=add(w.to_source, effect))
            case incoming.EndReply():
                w = replace(w, target_stream=add(w.target_stream, MoveEvent.TARGET_LOST))  # type: ignore[arg-type]
    return w


def router_does(w: World, event: MoveEvent) -> World:
    reading = moves.advance(w.reading, event)
    w = replace(w, reading=reading, anew=reading is Reading.LOST)
    if reading in (Reading.AT_SOURCE, Reading.LOST):  # the target is not needed any more
        w = claim_ends(w)
    if reading in (Reading.AT_TARGET, Reading.LOST):  # the other stream is left
        w = source_left(w)
    return w


def claim_ends(w: World) -> World:
    """The target learns that nobody reads."""
    if not w.claim:
        return w
    return replace(w, claim=False, target_stream=None, t_inbox=(*w.t_inbox, incoming.RouterLost()))


def source_left(w: World) -> World:
    """The router leaves the source's stream: the engine aborts what runs for it."""
    return replace(w, source_stream=None, s_has=False, s_runs=False)


def steps(w: World, chaos: int) -> list[tuple[World, int]]:
    """Every world that may come next; chaos: how many more things may go wrong."""
    found: list[tuple[World, int]] = []
    if w.s and w.s_inbox:
        event = w.s_inbox[0]
        found.append((source_does(replace(w, s_inbox=w.s_inbox[1:]), event), chaos))  # type: ignore[arg-type]
    if w.s and w.to_source:
        found.append((source_does(replace(w, to_source=w.to_source[1:]), w.to_source[0]), chaos))  # type: ignore[arg-type]
    if w.t and w.t_inbox:
        event = w.t_inbox[0]
        found.append((target_does(replace(w, t_inbox=w.t_inbox[1:]), event), chaos))  # type: ignore[arg-type]
    elif w.t and w.to_target and not w.t_inbox:
        found.append((target_does(replace(w, to_target=w.to_target[1:]), w.to_target[0]), chaos))  # type: ignore[arg-type]
    if w.r:
        for name in ("source_stream", "target_stream", "word"):
            queue = getattr(w, name)
            if queue:
                after = replace(w, **{name: queue[1:]})
                if (
                    name == "target_stream"
                    and queue[0] is MoveEvent.TARGET_ADMITTED
                    and w.reading is not Reading.ORPHANED
                ):
                    continue  # it waits in the stream until it is asked for
                found.append((router_does(after, queue[0]), chaos))
        if w.s_runs and w.source_stream == () and w.reading is Reading.UNCERTAIN:
            found.append((router_does(w, MoveEvent.SOURCE_CONTINUED), chaos))
    if chaos and w.s:
        dead = replace(w, s=False, s_runs=False, s_has=False, s_inbox=(), to_source=None, to_target=None)
        dead = replace(dead, t_inbox=(*w.t_inbox, incoming.SourceLost()))
        found.append((lost(dead, "word", "source_stream"), chaos - 1))
    if chaos and w.t:
        dead = replace(
            w, t=False, t_runs=False, reserved=False, t_inbox=(), to_target=None, to_source=None, claim=False
        )
        dead = replace(dead, s_inbox=(*w.s_inbox, TransferFailed("the target has gone")))
        found.append((lost(dead, "target_stream"), chaos - 1))
    if chaos and w.r:  # the router dies, or its client leaves: the same to the workers
        dead = claim_ends(source_left(replace(w, r=False)))
        found.append((replace(dead, word=None, s_inbox=(*dead.s_inbox, outgoing.Cancelled())), chaos - 1))
    if chaos and w.s and w.t and w.to_target is not None:  # their connection breaks
        cut = replace(w, to_target=None, to_source=None, t_inbox=(*w.t_inbox, incoming.SourceLost()))
        found.append((replace(cut, s_inbox=(*w.s_inbox, TransferFailed("broken"))), chaos - 1))
    if chaos and w.s and w.r and w.word is not None:  # the source's word on the move breaks off
        cut = lost(replace(w, s_inbox=(*w.s_inbox, outgoing.Cancelled())), "word")
        found.append((cut, chaos - 1))
    return found


def lost(w: World, *names: str) -> World:
    """Streams to the router break: what they still held may arrive or not; here it does not."""
    event = {
        "word": MoveEvent.REPORT_LOST,
        "source_stream": MoveEvent.SOURCE_LOST,
        "target_stream": MoveEvent.TARGET_LOST,
    }
    for name in names:
        if w.r and getattr(w, name) is not None:
            changed: dict[str, Any] = {name: (event[name],)}
            w = replace(w, **changed)
    return w


def explored(present: int, chaos: int) -> list[tuple[World, bool]]:
    """Every reachable world, and whether nothing more will happen in it by itself."""
    first = (World(present), chaos)
    seen, left = {first}, deque([first])
    worlds = []
    while left:
        world, more = left.popleft()
        after = steps(world, more)
        worlds.append((world, not steps(world, 0)))
        for one in after:
            if one not in seen:
                seen.add(one)
                left.append(one)
    return worlds


@pytest.mark.parametrize("present", [0, 3, 5])
@pytest.mark.parametrize("chaos", [0, 1, 2])
def test_a_moving_request_is_read_at_one_place_and_runs_at_one_in_the_end(present: int, chaos: int) -> None:
    ends = 0
    for w, quiet in explored(present, chaos):
        said = f"{w}"
        if w.target is TargetPhase.RUNNING:
            assert not w.reserved, said
        if w.reading is Reading.AT_TARGET:
            assert not w.s_has, said  # what is read at the target does not run at the source
        if not quiet:
            continue
        ends += 1
        assert w.source.over or not w.s, said
        assert not w.reserved, said  # no blocks are left behind
        runs = [w.s and w.s_runs, w.t and w.t_runs]
        if not w.r:
            assert runs == [False, False], said  # nobody would read it
        elif w.anew:
            assert runs == [False, False], said  # it is computed anew elsewhere, and nowhere else
        elif w.reading is Reading.AT_SOURCE:
            assert runs == [True, False], said
        else:
            assert w.reading is Reading.AT_TARGET, said
            assert runs == [False, True], said
        if chaos == 0:
            assert w.reading is Reading.AT_TARGET, said
    assert ends > 0
    print(ends)


def test_rounds_send_every_block_once_in_order_and_come_to_an_end() -> None:
    """However fast the request grows: after MAX_ROUNDS it is stopped."""
    for growth in (0, 1, 3, 10):
        state, effects = outgoing.advance(SourceState(), TransferAccepted(2), CHUNK)
        have, next_block, under_way = 9, 2, deque[int]()
        goal = 0
        for _ in range(10_000):
            if not effects and under_way:
                state, effects = outgoing.advance(state, ChunkReceived(under_way.popleft()), CHUNK)
                continue
            assert effects
            effect, *effects = effects
            match effect:
                case outgoing.Measure():
                    state, more = outgoing.advance(state, outgoing.Measured(have), CHUNK)
                    effects, goal, have = [*effects, *more], have, have + growth
                case outgoing.SendChunk(first, blocks):
                    assert first == next_block
                    assert 0 < blocks <= CHUNK
                    next_block += blocks
                    assert next_block <= goal, "a block that was not full when the round began"
                    under_way.append(blocks)
                    assert len(under_way) <= outgoing.WINDOW
                case outgoing.StopAndSendRest(first):
                    assert first == next_block
                    assert not under_way
                    break
        assert state.phase is SourcePhase.CLOSING
        assert state.round <= outgoing.MAX_ROUNDS


def test_rounds_are_reported_by_number_from_one_and_as_many_as_allowed_are_made() -> None:
    """One new block more than LAST_BLOCKS in each round: only MAX_ROUNDS ends the copying."""
    state, effects = outgoing.advance(SourceState(), TransferAccepted(0), CHUNK)
    growth = outgoing.LAST_BLOCKS + 1
    reported: list[outgoing.TellRound] = []
    blocks = 0
    while effects:
        effect, *effects = effects
        match effect:
            case outgoing.Measure():
                blocks += growth
                state, more = outgoing.advance(state, outgoing.Measured(blocks), CHUNK)
            case outgoing.SendChunk(_, count):
                state, more = outgoing.advance(state, ChunkReceived(count), CHUNK)
            case outgoing.TellRound():
                reported.append(effect)
                continue
            case _:
                break
        effects = [*effects, *more]
    assert state.phase is SourcePhase.CLOSING
    assert reported == [outgoing.TellRound(i, i * growth) for i in range(1, outgoing.MAX_ROUNDS + 1)]
