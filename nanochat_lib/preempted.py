"""The exceptions of a command that was asked to end. They are no errors, so `except Exception` does not see them."""

from __future__ import annotations

import signal


class Preempted(KeyboardInterrupt):
    """Stopped by SIGTERM: what was learned is saved, and the same command goes on from there.

    `code` is the exit code for it; `agreed` says that all processes of the run came to this together.
    """

    code, word = 75, "SIGTERM"

    def __init__(self, message: str = "", agreed: bool = False) -> None:
        super().__init__(message or f"stopped by {self.word}; the same command goes on where this one left off")
        self.agreed = agreed

    def after(self, stage: str, start: int, done: int) -> Preempted:
        """The same of a stage that went on from step `start` to `done`, and is saved."""
        if done > start:
            text = f"after step {done}, which is saved; the same command goes on from there"
        else:
            text = f"before another step was done; the same command goes on from step {start}"
        return type(self)(f"{stage}: stopped by {self.word} {text}", self.agreed)

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"{type(self).__name__}: {self}"]


class Interrupted(Preempted):
    """Stopped by Ctrl-C; what was learned is saved all the same."""

    code, word = 130, "Ctrl-C"


KINDS = {signal.SIGTERM: Preempted, signal.SIGINT: Interrupted}
