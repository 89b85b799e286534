"""The embedded primer: real text that every Python carries, an invented world, and everything made from the two."""

from nanochat_lib.primer.bundle import write_core_bundle
from nanochat_lib.primer.world import World

__all__ = ["World", "write_core_bundle"]
