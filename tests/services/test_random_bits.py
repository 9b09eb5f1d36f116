"""Random ids and seeds."""

import subprocess
import sys

from services.random_bits import BLOCK_BYTES, RandomBits


def test_no_byte_is_given_out_twice() -> None:
    """Also over the end of a block: ids of the same length never repeat."""
    bits = RandomBits()
    ids = [bits.hex(12) for _ in range(3 * BLOCK_BYTES // 12)]
    assert len(set(ids)) == len(ids)
    assert {len(one) for one in ids} == {24}


def test_integers_fill_their_range() -> None:
    """The highest and the lowest bit of a seed are set as often as not."""
    bits = RandomBits()
    values = [bits.below(63) for _ in range(2000)]
    assert all(0 <= value < 2**63 for value in values)
    for bit in (0, 62):
        assert 800 < sum(value >> bit & 1 for value in values) < 1200


FORKS = """
import os
from services.random_bits import RandomBits
bits = RandomBits()
bits.hex(1)  # a block has been read
child = os.fork()
os.write(1, f"{bits.hex(16)}\\n".encode())  # at once: the processes write to one pipe
if child:
    os.waitpid(child, 0)
"""


def test_a_forked_process_has_bits_of_its_own() -> None:
    """Otherwise the processes of a router would give their requests the same ids."""
    printed = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, check=True).stdout.split()
    assert len(set(printed)) == 2
