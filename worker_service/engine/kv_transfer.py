"""KV transfers of one engine: the blocks that they hold and reserve. Owned by the engine's thread.

Full blocks of a running sequence never change, and reserved blocks belong to one transfer. So blocks that are held here can
be copied by another thread while the engine computes.
"""

from collections.abc import Sequence as Seq

from penstock.services.domain.errors import AlreadyRunning, NotFound, Overloaded, invalid
from penstock.types.workers import KvLayout
from penstock.worker_service.engine.interface import Stopped
from penstock.worker_service.engine.runner import ModelRunner
from penstock.worker_service.scheduling.batching import BatchScheduler, Reservation
from penstock.worker_service.scheduling.blocks import OutOfBlocks
from penstock.worker_service.scheduling.sequence import Sequence

RETRY_S = 0.5  # retry delay when there is no room


class KvTransfers:
    """The transfers of one core."""

    def __init__(self, scheduler: BatchScheduler, runner: ModelRunner) -> None:
        self._scheduler, self._runner = scheduler, runner
        self._arriving: dict[str, Reservation] = {}

    def computed_tokens(self, request_id: str) -> tuple[int, ...]:
        """As in `KvTransferring`."""
        sequence = self._decoding(request_id)
        return tuple(sequence.tokens[: sequence.computed])

    def hold(self, request_id: str, first: int, count: int) -> list[int]:
        """Hold full blocks of a decoding request, to be copied.

        Raises:
            NotFound: The request is not decoding here.
            InvalidRequest: The blocks are not full.
        """
        sequence = self._decoding(request_id)
        full = sequence.computed // self._scheduler.pool.block_tokens
        if not 0 <= first < first + count <= full:
            raise invalid("first_block", f"blocks {first} to {first + count - 1} of {full} full ones")
        blocks = sequence.blocks[first : first + count]
        self._scheduler.pool.hold(blocks)
        return blocks

    def let_go(self, blocks: Seq[int]) -> None:
        self._scheduler.pool.release(blocks)

    def pause(self, request_id: str, first: int) -> Stopped:
        """As in `KvTransferring`."""
        sequence = self._decoding(request_id)
        used = -(-sequence.computed // self._scheduler.pool.block_tokens)
        if not 0 <= first <= used:
            raise invalid("first_block", f"the request has {used} blocks")
        data = self._runner.read_blocks(sequence.blocks[first:used])
        sequence.paused = True
        return Stopped(tuple(sequence.tokens), sequence.output_tokens, data)

    def resume(self, request_id: str) -> None:
        """As in `KvTransferring`."""
        sequence = self._scheduler.get(request_id)
        if sequence is not None:
            sequence.paused = False

    def reserve(self, transfer_id: str, layout: KvLayout, tokens: Seq[int], cache_salt: str = "") -> int:
        """As in `KvTransferring`."""
        if layout != self._runner.kv_layout:
            raise invalid("layout", f"this engine has {self._runner.kv_layout}, not {layout}")
        if transfer_id in self._arriving:
            raise AlreadyRunning(transfer_id)
        if not tokens:
            raise invalid("token_ids", "must not be empty")
        try:
            reservation = self._scheduler.reserve(tokens, cache_salt)
        except OutOfBlocks as error:
            raise Overloaded(str(error), RETRY_S) from None
        self._arriving[transfer_id] = reservation
        return reservation.present

    def hold_reserved(self, transfer_id: str, first: int, count: int) -> list[int]:
        """Hold reserved blocks, to be written; reserve further ones as needed.

        Raises:
            NotFound: There is no such reservation.
            InvalidRequest: The blocks are present already.
            Overloaded: There is not enough idle KV.
        """
        reservation = self._reservation(transfer_id)
        if first < reservation.present or count < 1:
            problem = f"blocks {first} to {first + count - 1}: {reservation.present} are present already"
            raise invalid("first_block", problem)
        try:
            self._scheduler.extend(reservation, first + count)
        except OutOfBlocks as error:
            raise Overloaded(str(error), RETRY_S) from None
        blocks = reservation.blocks[first : first + count]
        self._scheduler.pool.hold(blocks)
        return blocks

    def take(self, transfer_id: str) -> Reservation:
        """Remove and return the reservation of a request that starts now.

        Raises:
            NotFound: There is none.
        """
        reservation = self._reservation(transfer_id)
        del self._arriving[transfer_id]
        return reservation

    def release(self, transfer_id: str) -> None:
        """Release a reservation; no error if there is none."""
        reservation = self._arriving.pop(transfer_id, None)
        if reservation is not None:
            self._scheduler.release(reservation)

    def _reservation(self, transfer_id: str) -> Reservation:
        reservation = self._arriving.get(transfer_id)
        if reservation is None:
            raise NotFound("transfer", transfer_id)
        return reservation

    def _decoding(self, request_id: str) -> Sequence:
        sequence = self._scheduler.get(request_id)
        if sequence is None or not sequence.decoding or sequence.paused:
            raise NotFound("decoding request", request_id)
        return sequence
