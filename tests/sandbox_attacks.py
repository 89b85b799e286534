"""All attacks of test_sandbox_attacks.py."""

from sandbox_attacks_files import FILES, KERNEL
from sandbox_attacks_limits import SIZES, TIME
from sandbox_attacks_others import NETWORK, PROCESSES

ATTACKS = FILES + KERNEL + NETWORK + PROCESSES + TIME + SIZES
