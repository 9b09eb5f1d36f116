"""One table maps our errors to statuses and back: what crosses the wire is the same error on the other side."""

import pickle

import grpc
import pytest
from google.rpc import code_pb2, status_pb2

from penstock.services import errors
from penstock.services.domain.errors import (
    AlreadyRunning,
    DeadlineExceeded,
    InstanceDraining,
    InternalError,
    InvalidRequest,
    MessageTooLarge,
    NotFound,
    NotServed,
    Overloaded,
    PenstockError,
    PoisonRequest,
    PromptTooLong,
    RequestFailed,
    Unavailable,
    invalid,
)

CASES: list[tuple[PenstockError, grpc.StatusCode, int]] = [
    (invalid("prompt", "is wrong"), grpc.StatusCode.INVALID_ARGUMENT, 400),
    (PromptTooLong.by("prompt", 9, 8), grpc.StatusCode.INVALID_ARGUMENT, 400),
    (MessageTooLarge.by("prompt", 9, 8), grpc.StatusCode.INVALID_ARGUMENT, 413),
    (NotFound("model", "m"), grpc.StatusCode.NOT_FOUND, 404),
    (AlreadyRunning("r"), grpc.StatusCode.ALREADY_EXISTS, 409),
    (Overloaded("the queue is full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED, 429),
    (Unavailable("the engine is away"), grpc.StatusCode.UNAVAILABLE, 503),
    (InstanceDraining("this worker is draining"), grpc.StatusCode.UNAVAILABLE, 503),
    (InternalError("a bug"), grpc.StatusCode.UNAVAILABLE, 503),
    (DeadlineExceeded("late"), grpc.StatusCode.DEADLINE_EXCEEDED, 504),
    (NotServed("no"), grpc.StatusCode.UNIMPLEMENTED, 501),
    (RequestFailed("its row failed"), grpc.StatusCode.FAILED_PRECONDITION, 422),
]


@pytest.mark.parametrize(("error", "code", "http"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_an_error_keeps_its_kind_over_the_wire(error: PenstockError, code: grpc.StatusCode, http: int) -> None:
    assert errors.grpc_code(error) is code
    assert errors.http_status(error) == http
    found = errors.from_proto(status_pb2.Status.FromString(errors.to_proto(error).SerializeToString()))
    assert type(found) is type(error)
    if isinstance(error, InvalidRequest) and isinstance(found, InvalidRequest):
        assert found.problems == error.problems
    if isinstance(error, Overloaded) and isinstance(found, Overloaded):
        assert found.retry_after_s == error.retry_after_s
    pickled = pickle.loads(pickle.dumps(error))  # as from a process of a pool
    assert (type(pickled), str(pickled), vars(pickled)) == (type(error), str(error), vars(error))


def test_a_poison_request_is_for_clients_never_to_be_sent_again() -> None:
    error = PoisonRequest(2)
    assert (errors.grpc_code(error), errors.http_status(error)) == (grpc.StatusCode.FAILED_PRECONDITION, 422)
    assert error.reason == "POISON_REQUEST"


def test_the_grpc_librarys_own_exhaustion_is_not_taken_for_a_service_that_is_full() -> None:
    plain = status_pb2.Status(code=code_pb2.RESOURCE_EXHAUSTED, message="Sent message larger than max (9 vs. 8)")
    found = errors.from_proto(plain)
    assert isinstance(found, MessageTooLarge)
    assert not isinstance(found, Overloaded)


@pytest.mark.parametrize("code", [code_pb2.INTERNAL, code_pb2.UNKNOWN])
def test_a_fault_of_another_service_is_told_from_one_that_is_away(code: code_pb2.Code.ValueType) -> None:
    assert isinstance(errors.from_proto(status_pb2.Status(code=code)), InternalError)
    assert type(errors.from_proto(status_pb2.Status(code=code_pb2.UNAVAILABLE))) is Unavailable
