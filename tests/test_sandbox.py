"""The sandbox's contract at every level that works here: results, limits, cleanliness. Attacks: test_sandbox_attacks.py."""

import sys

import pytest

from nanochat_lib import sandbox
from nanochat_lib.errors import UserError

HERE = sandbox.LEVELS[: sandbox.LEVELS.index(sandbox.level()) + 1]
levels = pytest.mark.parametrize("use", HERE)


@levels
def test_prints(use: str) -> None:
    result = sandbox.run_code("print('héllo', input())", stdin="wörld\n", use=use)
    assert result.success and result.stdout == "héllo wörld\n" and result.stderr == "" and result.error is None
    assert (result.level, result.exit_code, result.timeout, result.memory_exceeded) == (use, 0, False, False)


def test_more_than_is_here_is_refused() -> None:
    with pytest.raises(UserError, match="no isolation level 'docker'"):
        sandbox.run([sys.executable, "-c", ""], require="docker")
