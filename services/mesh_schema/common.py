"""What several parts of the schema share."""

from typing import Annotated

from pydantic import AfterValidator, ConfigDict

MAX_PORT = 65_535
DEFAULT_KV_TOKENS = 32_768  # where no GPU's memory decides
DEFAULT_STEP_TOKENS = 512
MAX_PROCESSES = 1024  # of one kind in a mesh file: more is a typing error, and would exhaust the machine
DEVICES = ("cpu", "cuda", "hpu", "mps", "npu", "xpu")  # torch's names of what computes; a number may follow: cuda:1
FROZEN = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def _known_device(device: str) -> str:
    name, colon, number = device.partition(":")
    if name not in DEVICES or (colon and not number.isdecimal()):
        raise ValueError(f"unknown device '{device}': must be one of {', '.join(DEVICES)}, or with a number: cuda:1")
    return device


Device = Annotated[str, AfterValidator(_known_device)]
