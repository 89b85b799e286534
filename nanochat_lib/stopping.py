"""Being asked to end, by SIGTERM (somebody wants the machine back) or Ctrl-C, at any moment of a command.

A thread learns of the signal at once, through the pipe that Python's C handler writes to, whatever the main thread is
doing. What follows:

- Where nothing would be lost, the main thread gets the exception Preempted (Interrupted for Ctrl-C) on the spot.
- In a `deferred` block, a training loop, the signal is only noted: the loop looks for it where its state is whole
  (runtime.check_preempted), saves, and raises the exception itself.
- Whoever has not ended after the grace time, in a compiler for example, is ended by the thread: what was saved before
  counts. A save that is under way is finished first.
- A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nanochat_lib.beside import briefly, compiling, say
from nanochat_lib.preempted import KINDS, Interrupted, Preempted
from nanochat_lib.progress import in_notebook

GRACE = 25.0  # seconds; clouds give 30 from the notice to the end
SAVE_GRACE = 600.0  # seconds for a save that had begun: if the machine goes first, the checkpoint before it counts
AGAIN = 2.0  # seconds in which another signal is the same request, passed on by a launcher and by a shell
UNWIND = 5.0  # seconds that the process has for its own end after a save
POLL = 0.5


@dataclass
class Link:
    """How a notice travels to the other processes of a run; the functions may take their time, or never return."""

    index: int
    tell: Callable[[], None]
    heard: Callable[[], bool]


class Watch(threading.Thread):
    """The handlers of both signals, and the thread that ends a process which does not end itself."""

    def __init__(self, grace: float, whole: bool) -> None:
        super().__init__(name="stopping", daemon=True)
        self.grace, self.whole = grace, whole  # whole: the process ends after this; else only the block does
        self.notice: type[Preempted] | None = None
        self.since = self.saved = 0.0
        self.deferring = self.saving = 0
        self.told = self.closed = False  # told: the main thread has had its say
        self.leaving = False  # the main thread ends the process as it should
        self.first = threading.Lock()  # taken by the first notice, never given back
        self.sent = threading.Event()  # the other processes know, or need not be told
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        # A background job may be born deaf to Ctrl-C, and stays so.
        kinds = [kind for kind in KINDS if signal.getsignal(kind) != signal.SIG_IGN]
        self.before = {number: signal.signal(number, self.handle) for number in kinds}
        self.wakeup = signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        self.start()

    def close(self) -> None:
        """Back to what was before; but a process that is to end stays watched until it has."""
        if self.whole and self.notice:
            return
        signal.set_wakeup_fd(self.wakeup)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.closed = True
        os.write(self.writer, b"\0")
        self.join()
        os.close(self.reader)
        os.close(self.writer)

    def handle(self, number: int, _frame: object) -> None:
        """In the main thread, between two of Python's instructions."""
        again = self.notice is not None and time.monotonic() - self.since > AGAIN
        self.note(KINDS[number])
        insists = again and number == signal.SIGINT and in_notebook()  # who would lose the kernel, not a process
        first, self.told = not self.told, True
        if insists or (first and not self.deferring and not _link):
            raise KINDS[number]()

    def note(self, kind: type[Preempted], told: bool = False) -> None:
        """The first notice counts; it goes on to the other processes unless it came from there."""
        if not self.first.acquire(blocking=False):
            return
        if told or not _link:
            self.sent.set()
        self.since = time.monotonic()
        self.notice = kind  # last: the thread acts on it at once
        if not self.sent.is_set():
            threading.Thread(target=self.pass_on, args=(_link.tell,), daemon=True).start()

    def pass_on(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        finally:
            self.sent.set()

    def deadline(self) -> float:
        if self.notice is Interrupted and in_notebook():
            return float("inf")
        if self.saving:
            return self.since + SAVE_GRACE
        return max(self.since + self.grace, self.saved + UNWIND if self.saved > self.since else 0.0)

    def run(self) -> None:
        said = False
        while not self.closed:
            ready, _, _ = select.select([self.reader], [], [], POLL)
            for number in os.read(self.reader, 64) if ready else b"":
                if number not in KINDS:
                    continue
                again = self.notice is not None and time.monotonic() - self.since > AGAIN
                self.note(KINDS[number])
                if again and not (number == signal.SIGINT and in_notebook()):
                    self.end("a second signal ends it at once")
            if self.closed or self.notice is None:
                continue
            if self.deferring and not said:
                said = True
                line = f"{self.notice.word}: this step is finished and saved"
                briefly(lambda line=line: say(line + ("" if in_notebook() else "; a second signal ends at once")), 1.0)
            if _link and not self.deferring and not self.leaving:
                self.end("no training was under way")
            if time.monotonic() > self.deadline():
                what = "it was compiling" if compiling() else "it was busy"
                self.end(f"after {time.monotonic() - self.since:.0f} s {what} still and is ended")

    def end(self, why: str) -> None:
        """Ends the process from here; nothing that might hang is waited for."""
        line = f"stopped by {self.notice.word}; {why}: {_kept}, the same command goes on from there"
        briefly(lambda: [say(line), *(call(line) for call in _last_words)])
        self.sent.wait(AGAIN)  # or the others would wait for this process until their own connection times out
        if _link and _link.index == 0:
            time.sleep(AGAIN)  # the others lose their runtime with this process: they are to end before
        os._exit(self.notice.code)


_watch: Watch | None = None
_link: Link | None = None
_last_words: list[Callable[[str], None]] = []
_kept = "what was finished before counts"
_pace = threading.local()  # `alone` belongs to a thread: two of them may enter and leave in any order
beats = 0  # grows whenever the process shows that it is alive; the stall detector compares


_mask = threading.local()


def _hold() -> None:
    """Before a fork: a signal to the child waits until the child has forgotten its parent's handlers and pipe."""
    _mask.old = signal.pthread_sigmask(signal.SIG_BLOCK, KINDS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask.old)


def _forget() -> None:
    """In a forked child, which has neither the thread nor a share in what is asked of its parent."""
    global _watch, _link
    if _watch:
        signal.set_wakeup_fd(-1)
        for number, handler in _watch.before.items():
            signal.signal(number, handler)
    _watch = _link = None
    _release()


os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_forget)


@contextlib.contextmanager
def watching(grace: float = GRACE, whole: bool = False) -> Iterator[None]:
    """In the block both signals are handled as told above. Does nothing inside another one, or beside the main thread.

    `whole`: the process is going to end after the block, and is held to its grace time until it has.
    """
    global _watch
    if _watch or threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch = Watch(grace, whole)
    try:
        yield
    finally:
        _watch.close()
        if not (whole and _watch.notice):
            _watch = None


def set_grace(seconds: float) -> None:
    """The grace time, when it is known only after the start."""
    if _watch:
        _watch.grace = seconds


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """In the block a signal interrupts nothing: whoever runs here asks `noticed`, or runtime.check_preempted.

    A notice that nobody asked for any more is raised at the block's end.
    """
    watch = _watch
    if watch is None:
        yield
        return
    watch.deferring += 1
    try:
        yield
    except Preempted:
        watch.leaving = True
        raise
    except Exception as error:
        if not (stop := overtaken()):
            raise
        raise stop from error
    finally:
        watch.deferring -= 1
    if watch.notice and not watch.deferring and not _link:
        raise watch.notice()


def overtaken() -> Preempted | None:
    """What to raise instead of an error: between processes that are to end, it comes from one of them having ended.

    Asked at the error itself, since the other's end may be felt before its notice is heard: while two processes open
    their first connection, no Python runs in the one that waits.
    """
    watch, found = _watch, _link
    if not (watch and found):
        return None
    watch.leaving = True  # first, or the thread would end the process on hearing of the notice
    if watch.notice is None:
        briefly(lambda: found.heard() and watch.note(Preempted, told=True), AGAIN)
    if watch.notice is None:
        watch.leaving = False
        return None
    why = "while another process of the run ended; the same command goes on from what was saved"
    return watch.notice(f"stopped by {watch.notice.word}, {why}")


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """A save that is under way when the grace time ends is finished."""
    watch = _watch
    if watch is None:
        yield
        return
    watch.saving += 1
    try:
        yield
    finally:
        watch.saved = time.monotonic()
        watch.saving -= 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """In the block this process decides for itself to stop, whatever the others do."""
    before, _pace.alone = getattr(_pace, "alone", False), True
    try:
        yield
    finally:
        _pace.alone = before


def deciding_alone() -> bool:
    return _link is None or getattr(_pace, "alone", False)


def noticed() -> type[Preempted] | None:
    """The exception to raise, when this process was asked to end and is in a `deferred` block."""
    return _watch.notice if _watch and _watch.deferring else None


def is_deferred() -> bool:
    return _watch is not None and _watch.deferring > 0


def keeps(step: int) -> None:
    """The newest step that is saved, for the last line of a process that must be ended."""
    global _kept
    _kept = f"step {step}, the last that is saved, counts" if step else "nothing was saved so far"


@contextlib.contextmanager
def last_words(call: Callable[[str], None]) -> Iterator[None]:
    """In the block `call(line)` is made before the process is ended from outside its main thread."""
    _last_words.append(call)
    try:
        yield
    finally:
        if not (_watch and _watch.whole and _watch.notice):
            _last_words.remove(call)


def link(found: Link | None) -> None:
    """Tells the other processes of a notice, and listens for theirs, from now on."""
    global _link
    _link = found

    def listen() -> None:
        while _link is found:
            if found.heard():
                while _watch is None and _link is found:
                    time.sleep(POLL)
                if _watch:
                    _watch.note(Preempted, told=True)
                return
            time.sleep(2 * POLL)

    if found:
        threading.Thread(target=listen, name="listening", daemon=True).start()
