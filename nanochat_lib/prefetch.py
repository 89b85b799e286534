"""A thread that works ahead of the one who asks: while a step computes, the next batches are prepared."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Generator
from typing import Any

POLL_SECONDS = 0.05  # how soon a thread that waits for room notices that it should stop


class Prefetcher:
    """Iterates over the generator `source`; a thread keeps up to `depth` items ready (0: no thread, made on demand).

    An exception of the source reaches the caller with its own type, after the items made before it, and again on every
    later call. Closing, or losing the last reference, ends the thread and closes the source.
    """

    def __init__(self, source: Generator[Any, None, None], depth: int) -> None:
        self._source = source
        self._end: BaseException | None = None
        self._queue: queue.Queue | None = None
        if depth > 0:
            self._queue = queue.Queue(depth)
            stop = threading.Event()
            thread = threading.Thread(target=_produce, args=(source, self._queue, stop), daemon=True)
            # The thread knows nothing of this object, so that it can be collected; at the latest before Python ends.
            self._finalizer = weakref.finalize(self, _stop, stop, thread)
            thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        if self._end is not None:
            raise self._end
        if self._queue is None:
            try:
                return next(self._source)
            except BaseException as error:
                self._end = error
                raise
        item, error = self._queue.get()
        if error is not None:
            self._end = error
            raise error
        return item

    def close(self) -> None:
        """Ends the thread; items handed out before stay valid."""
        self._end = self._end or StopIteration()
        if self._queue is None:
            self._source.close()
        else:
            self._finalizer()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _produce(source: Generator[Any, None, None], out: queue.Queue, stop: threading.Event) -> None:
    """Body of the thread: (item, None) for each item, then (None, the exception that ended the source)."""

    def put(item: Any, error: BaseException | None) -> None:
        while not stop.is_set():
            try:
                return out.put((item, error), timeout=POLL_SECONDS)
            except queue.Full:
                continue

    try:
        for item in source:
            put(item, None)
            if stop.is_set():
                break
        put(None, StopIteration())
    except BaseException as error:
        put(None, error)
    finally:
        source.close()


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    if thread is not threading.current_thread():  # the last reference may go anywhere, also in the thread itself
        thread.join(timeout=10)
