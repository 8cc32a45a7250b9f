"""A request to stop (SIGTERM, SIGINT, SIGUSR1) is noted, and the run ends after the step, with everything saved."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from mmdet.errors import UserError

OVERDUE = 25.0  # s until a process that is stuck in native code is ended; torchrun kills after 30
_ECHO = 1.0  # s in which a second SIGINT under torchrun is the launcher's copy of the first

_active: StopSignals | None = None


class Stopped(UserError):  # noqa: N818
    """The run was asked to stop and did; ``exit_code`` is 128 + the signal's number, as shells have it."""

    def __init__(self, number: int, message: str = "") -> None:
        super().__init__(message or f"asked to stop by {signal_name(number)}")
        self.number, self.exit_code = number, 128 + number


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class StopSignals:
    """Notes the first stop signal in ``number`` (0: none yet). A second SIGINT stops at once, as Ctrl-C always did.

    Handlers are installed between ``install`` and ``close``, in the main thread only. With ``guard_native`` a process that
    cannot answer SIGTERM, since its main thread waits in native code (for a rank that is gone, say), is ended after
    ``OVERDUE`` seconds.
    """

    def __init__(self, guard_native: bool = False) -> None:
        self.number = 0
        self._since = 0.0
        self._may_raise = False  # the Trainer allows it while it evaluates
        self._inside = False  # in work that may be interrupted
        self._raised = False  # there, by a signal
        self._guard_native = guard_native
        self._old: dict[int, object] = {}
        self._wake: tuple[socket.socket, socket.socket] | None = None

    def install(self) -> None:
        global _active
        if threading.current_thread() is not threading.main_thread():
            return
        _active = self
        for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
            number = getattr(signal, name, None)  # Windows has no SIGUSR1
            if number is not None:
                self._old[number] = signal.signal(number, self._handle)
        if self._guard_native:
            self._watch_main_thread()

    def close(self) -> None:
        global _active
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._old = {}
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            for end in self._wake:
                end.close()
            self._wake = None
        if _active is self:
            _active = None

    def _handle(self, number: int, frame: object) -> None:
        if self.number and number == signal.SIGINT:
            is_echo = "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._since < _ECHO
            if not is_echo:
                raise KeyboardInterrupt
            return
        if not self.number:
            self.number, self._since = number, time.monotonic()
        if self._inside and self._may_raise:
            self._raised = True
            raise Stopped(self.number)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Inside, :func:`interruptible` work is left at once: its state has been saved before."""
        self._may_raise = True
        try:
            yield
        finally:
            self._may_raise = False

    def _watch_main_thread(self) -> None:
        """Python runs handlers in the main thread, between two of its instructions; the byte that the C handler writes comes
        always."""
        reading, writing = socket.socketpair()
        writing.setblocking(False)
        signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
        self._wake = (reading, writing)
        threading.Thread(target=self._end_when_overdue, args=(reading,), name="overdue signals", daemon=True).start()

    def _end_when_overdue(self, reading: socket.socket) -> None:
        while True:
            try:
                numbers = reading.recv(64)
            except OSError:
                return
            if not numbers:
                return
            if signal.SIGTERM not in numbers:
                continue
            deadline = time.monotonic() + OVERDUE
            while not self.number and time.monotonic() < deadline:
                time.sleep(0.2)
            if not self.number and self._wake is not None:
                os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Around work that a stop signal may end at once, with ``Stopped``, where the Trainer allows it. Collectives stay outside:
    a rank that left one would keep the others waiting. Work that catches every exception, or makes another one of it, is left
    all the same."""
    signals = _active
    if signals is None:
        yield
        return
    signals._inside, signals._raised = True, False
    try:
        if signals.number and signals._may_raise:
            raise Stopped(signals.number)
        yield
        if signals._raised:
            raise Stopped(signals.number)
    except Exception as error:
        if signals._raised and not isinstance(error, Stopped):
            raise Stopped(signals.number) from error
        raise
    finally:
        signals._inside = False
