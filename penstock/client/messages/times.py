"""Durations in protobuf messages, in seconds."""

from google.protobuf.duration_pb2 import Duration


def duration(value_s: float) -> Duration:
    value = Duration()
    value.FromNanoseconds(round(value_s * 1e9))
    return value


def seconds(value: Duration) -> float:
    return value.ToNanoseconds() / 1e9
