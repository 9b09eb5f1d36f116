"""Counts of requests with an SLO. No I/O."""

from dataclasses import dataclass


@dataclass(slots=True)
class SloCounts:
    """Requests with an SLO that have ended, by how they were served. attained, broken: a worker had promised to keep it."""

    attained: int = 0
    broken: int = 0
    best_effort: int = 0
    declined: int = 0

    def __add__(self, other: "SloCounts") -> "SloCounts":
        return SloCounts(
            self.attained + other.attained,
            self.broken + other.broken,
            self.best_effort + other.best_effort,
            self.declined + other.declined,
        )
