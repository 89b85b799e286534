"""A run that uses the learner's functions: what was asked for and what came of it is in the run's folder, mine.json.

Started again, the run takes the same functions or refuses: half a run with other code would be nobody's.
"""

from __future__ import annotations

from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_json, read_json

FILE = "mine.json"


def check_names(asked: str) -> None:
    """UserError, naming the nearest, unless `asked` is "all" or names of exercises with commas between them."""
    from nanochat_lib.course import registry

    for name in [] if asked == "all" else asked.split(","):
        registry.exercise(name.strip())


def begin(folder: Path, asked: str, now: bool = True) -> dict | None:
    """Installs the learner's functions ("all" or "id,id") for the run in `folder`; returns what mine.json holds.

    Nothing is asked for: what the run began with. None where that is nothing, too. With `now=False` only what can be
    wrong with the request is found out, in a process that is to leave JAX alone.
    """
    from nanochat_lib.course import install

    path = folder / FILE
    saved = read_json(path) if path.exists() else None
    if not asked and saved is None:
        return None
    if saved is None and any((folder / "stages").glob("*.json")):
        raise UserError(f"{folder} holds a run that began without functions of yours; use another --run-dir")
    if saved and asked and asked != saved["asked"]:
        raise UserError(f"{folder} holds a run with --mine {saved['asked']}; use the same or another --run-dir")
    asked = asked or saved["asked"]
    check_names(asked)
    if not now:
        return saved
    share = install.install(saved["used"] if saved else asked)
    if saved and share.used != saved["used"]:
        gone, why = next(iter(share.refused.items()))
        raise UserError(
            f"{folder} began with your {gone}, but {why}; `nanochat course undo {gone}` goes back, or use another "
            "--run-dir"
        )
    record = saved or {"asked": asked, **share.to_dict()}
    from nanochat_lib import distributed
    from nanochat_lib.report.page import share_line

    if distributed.first():
        atomic_write_json(path, record)
    print(share_line(record))
    for name, why in record["refused"].items() if asked != "all" else ():
        print(f"{name}: the library's ({why})")
    return record
