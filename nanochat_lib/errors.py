"""What goes wrong, in one line: a UserError says what, which limit, and how to fix it; `explain` words all others."""

from __future__ import annotations

import errno


class UserError(Exception):
    """A mistake in the input, the configuration or the machine, worded for the person who can mend it.

    The command line prints the message alone and exits with a non-zero code; the traceback comes with `--debug`.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: in a notebook, too, the mistake is one line."""
        return [f"UserError: {self}"]


class InUse(UserError):
    """The run's folder belongs to another process, which goes on with it."""


FIXES = {
    errno.ENOSPC: "free some space or choose another --run-dir",
    errno.EDQUOT: "free some of your quota or choose another --run-dir",
    errno.EROFS: "choose a --run-dir that can be written",
    errno.EACCES: "choose a --run-dir that you may write, or change the permissions",
    errno.ENOENT: "check the path",
}


def explain(error: BaseException) -> str:
    """One line for any error."""
    if isinstance(error, UserError):
        return str(error)
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, OSError) and error.errno in FIXES:
        where = f": {error.filename}" if error.filename else ""
        return f"{error.strerror}{where}; {FIXES[error.errno]}"
    return f"{type(error).__name__}: {first}; --debug shows where"
