"""Runs code that nobody vouches for: what a language model or a learner wrote.

Three levels, the strongest that works here is used (docs/sandbox.md says what each stops): `bubblewrap`, `namespaces`
(the same by the kernel alone), `limits` (time, memory, output; no security boundary). The program never runs in the
caller's process, and nothing of it is left when `run` returns.
"""

from nanochat_lib.sandbox.execute import Result, run, run_code
from nanochat_lib.sandbox.levels import LEVELS, describe, level, reasons
from nanochat_lib.sandbox.remove import remove_tree

__all__ = ["LEVELS", "Result", "describe", "level", "reasons", "remove_tree", "run", "run_code"]
