"""What is fitted to labelled samples, and its file."""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from penstock.services.field_problems import from_json

MIN_SAMPLES = 20


class CalibrationError(Exception):
    """The samples or the calibration file cannot be used."""


@dataclass(frozen=True, slots=True)
class Fitted(ABC):
    """What was fitted to samples."""

    @property
    @abstractmethod
    def summary(self) -> str:
        """Its quality."""

    @abstractmethod
    def problem(self) -> str:
        """Why it cannot be used; empty if it can."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file.

        Raises:
            CalibrationError: It is none of this kind.
        """
        try:
            fitted = from_json(cls, path.read_bytes())
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path}: {error}") from error
        if problem := fitted.problem():
            raise CalibrationError(f"{path}: {problem}")
        return fitted


def suffice(good: Collection[bool]) -> bool:
    """Whether samples with these labels are enough to fit to: there must be good and bad ones."""
    return len(good) >= MIN_SAMPLES and any(good) and not all(good)


def too_few(count: int) -> CalibrationError:
    return CalibrationError(f"at least {MIN_SAMPLES} samples are needed, good and bad ones, not {count}")
