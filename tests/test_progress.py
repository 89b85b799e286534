"""Progress in a log, in a terminal, in a notebook, and through a file to the process that drives the run."""

import io
import re
import sys

import pytest

from nanochat_lib import progress
from nanochat_lib.progress import Progress, format_seconds, format_value


class Clock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress.time, "monotonic", made.monotonic)
    monkeypatch.delenv("NANOCHAT_PROGRESS_FILE", raising=False)
    return made


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (9.9, "0:09"), (73, "1:13"), (3600, "1:00:00"), (3700, "1:01:40"), (86400, "24:00:00")],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.23456, "1.235"), (0.000123456, "0.0001235"), (12345.6, "12,346"), (1234567, "1,234,567"),
                        (-0.5, "-0.5"), (float("nan"), "nan"), ("x", "x"), (0, "0")]
)  # fmt: skip
def test_values(value: object, text: str) -> None:
    assert format_value(value) == text


def test_a_log_gets_a_line_now_and_then_and_always_the_last(clock, capsys) -> None:
    with Progress(100, "pretrain") as bar:
        for step in range(100):
            clock.now += 0.5
            bar.update(loss=2.0 - step / 100)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11  # every 5 of 50 seconds, and the end
    assert lines[0] == "pretrain: 10/100 steps · loss 1.91 · 0:45 left"
    assert lines[-1] == "pretrain: 100/100 steps · loss 1.01 · took 0:50"


def test_the_time_left_counts_only_this_start(clock, capsys) -> None:
    """A resumed run did its first 90 steps earlier: they say nothing about the speed of today."""
    bar = Progress(100, "sft", start=90)
    clock.now += 10
    bar.update(5)
    assert bar.line() == "sft: 95/100 steps · 0:10 left"
    bar.close()


def test_fields_stay_until_replaced_and_the_unit_shows(clock, capsys) -> None:
    bar = Progress(4, "read", unit="document")
    bar.update(1, words=10, loss=1.0)
    bar.update(1, loss=0.5)
    assert "2/4 documents · words 10 · loss 0.5" in bar.line()


def test_nothing_done_yet_is_no_division_by_zero(clock, capsys) -> None:
    Progress(10, "rl").close()
    Progress(0, "rl").close()
    assert "rl: 0/10 steps" in capsys.readouterr().err


def test_the_end_is_shown_when_the_work_fails(clock, capsys) -> None:
    with pytest.raises(ValueError, match="boom"), Progress(10, "rl") as bar:
        bar.update(3)
        raise ValueError("boom")
    assert "rl: 3/10 steps" in capsys.readouterr().err


def test_the_driver_reads_whole_lines_from_the_file(clock, tmp_path, monkeypatch) -> None:
    path = tmp_path / "latest"
    monkeypatch.setenv("NANOCHAT_PROGRESS_FILE", str(path))
    bar = Progress(10, "sft")
    clock.now += 6
    bar.update(4, reward=0.25)
    assert path.read_text() == bar.line()
    bar.close()
    assert [p.name for p in tmp_path.iterdir()] == ["latest"]  # no half-written file is left


def test_a_terminal_gets_a_bar(clock, monkeypatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(8, "pretrain") as bar:
        for _ in range(8):
            clock.now += 1
            bar.update(loss=1.5)
    for part in ("pretrain: 100%", "8/8", "loss=1.5"):
        assert part in terminal.getvalue()


def test_a_notebook_gets_one_bar_that_renews_itself(clock, monkeypatch, capsys) -> None:
    shown: list[dict] = []

    class Handle:
        def update(self, data: dict, metadata: dict, raw: bool) -> None:
            shown.append(data)

    def display(data: dict, metadata: dict, raw: bool, display_id: bool) -> Handle:
        shown.append(data)
        return Handle()

    import IPython.display

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    with Progress(20, "rl <2>") as bar:
        for _ in range(20):
            clock.now += 0.5
            bar.update()
    assert len(shown) == 12 and shown[-1]["text/plain"].startswith("rl <2>: 20/20 steps · took 0:10")
    filled = [re.search(r"width:(\d+)%;.*rl &lt;2&gt;: (\d+)/20", data["text/html"]).groups() for data in shown]
    assert filled[0] == ("0", "0") and filled[-1] == ("100", "20")
    assert all(int(percent) == 5 * int(done) for percent, done in filled)
    assert capsys.readouterr().err == ""


def test_a_script_and_a_plain_terminal_are_no_notebook(monkeypatch) -> None:
    assert not progress.in_notebook()
    monkeypatch.setitem(sys.modules, "IPython", None)
    assert not progress.in_notebook()

    class ZMQInteractiveShell:
        pass

    class Kernel:
        get_ipython = staticmethod(ZMQInteractiveShell)

    monkeypatch.setitem(sys.modules, "IPython", Kernel)
    assert progress.in_notebook()
