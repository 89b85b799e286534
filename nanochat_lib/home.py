"""The folder of everything that is kept between runs: downloaded data, compiled programs."""

from __future__ import annotations

import os
from pathlib import Path


def base_dir() -> Path:
    """NANOCHAT_BASE_DIR, else ~/.cache/nanochat, as nanochat has it."""
    given = os.environ.get("NANOCHAT_BASE_DIR")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "nanochat"
