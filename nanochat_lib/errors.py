"""The one exception that means "the input is at fault": one line that says what, which limit, and how to fix it."""


class UserError(Exception):
    """A mistake in the input, the configuration or the machine, worded for the person who can mend it.

    The command line prints the message alone and exits with a non-zero code; the traceback comes with `--debug`.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback: in a notebook, too, the mistake is one line."""
        return [f"UserError: {self}"]
