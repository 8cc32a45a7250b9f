"""One run, one folder: a lock file says which process writes there.

The file is made with ``O_EXCL``, which network file systems honour too; no ``flock`` is involved. Its modification time is the
owner's heartbeat. A lock whose owner is gone is taken over: on the owner's own machine that is asked of the system (a process
number that was given to another process since does not count), from another machine it is believed after ``STALE`` seconds
without a heartbeat.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import subprocess
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from loguru import logger

from mmdet.errors import UsageError

NAME = "run.lock"
BEAT = 20.0  # s between two signs of life
STALE = 180.0  # s; network file systems may show times that are a minute old
_SETTLE = 0.2  # s after a takeover, in which another one that took over at the same moment shows


@dataclass(frozen=True)
class Owner:
    """A process, so that it can be told from every other one. Empty texts: not known."""

    host: str = ""
    boot: str = ""  # of the machine's present start
    space: str = ""  # in which its number counts: containers have their own
    pid: int = 0
    started: str = ""  # when, in the system's own words
    since: str = ""  # since when it has the folder, for people
    token: str = ""

    @staticmethod
    def this_process() -> Owner:
        return Owner(
            socket.gethostname(),
            _read_text("/proc/sys/kernel/random/boot_id"),
            _process_space(),
            os.getpid(),
            process_start(os.getpid()) or "",
            time.strftime("%Y-%m-%d %H:%M:%S"),
            secrets.token_hex(8),
        )

    @staticmethod
    def of_file(path: Path) -> Owner | None:
        """None: there is no such file. A file that says nothing readable has an owner of whom nothing is known."""
        for _ in range(10):
            try:
                content = json.loads(path.read_text(encoding="utf-8"))
                return Owner(**{k: content[k] for k in Owner.__dataclass_fields__})
            except (FileNotFoundError, NotADirectoryError):
                return None
            except (OSError, ValueError, KeyError, TypeError):
                time.sleep(0.05)  # it is being written
        return Owner()

    def is_here(self, me: Owner) -> bool:
        """Whether this process can ask the system about it."""
        return (self.host, self.boot, self.space) == (me.host, me.boot, me.space)

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host!r}" if self.pid else "an unknown process"


def process_start(pid: int) -> str | None:
    """When a process of this machine started, in the system's words; empty: there is no such process, or only its remains;
    None: the system does not tell."""
    if os.name != "posix":
        return None
    stat = _read_text(f"/proc/{pid}/stat")
    if stat:
        fields = stat.rpartition(")")[2].split()  # proc(5): field 3 is the state, field 22 the start in ticks since boot
        return "" if fields[0] in "ZX" else fields[19]
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return ""
    except (OSError, OverflowError):
        return None
    if Path("/proc/self/stat").exists():
        return None  # there, but not shown to this user
    try:
        asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return asked.stdout.strip()


def _process_space() -> str:
    with contextlib.suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _read_text(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


class RunLock:
    """The right to write in a run folder, from ``acquire`` to ``release``. Rank 0 holds it for its whole job."""

    def __init__(self, run_dir: Path, beat: float = BEAT, stale: float = STALE) -> None:
        """``beat``, ``stale``: seconds; they must be the same for all that may meet in a folder."""
        self.run_dir, self.path = run_dir, run_dir / NAME
        self.beat, self.stale = beat, stale
        self.me = Owner.this_process()
        self.held = False
        self._end = threading.Event()

    def require_free(self, wait: bool = False) -> None:
        """Stops when a run that is alive has the folder; changes nothing. ``wait``: a run of another machine that gives no sign
        of life is watched until it counts as gone.

        Raises:
            UsageError: names the other process and says what to do.
        """
        owner = Owner.of_file(self.path)
        if owner is not None and not self._is_left_over(owner, wait):
            raise self._refusal(owner)

    def acquire(self, wait: bool = False) -> None:
        """Takes the folder, also from a run that is gone. ``wait``: as in :meth:`require_free`.

        Raises:
            UsageError: a run that is alive has it.
            OSError: the lock file could not be written.
        """
        taken_over = False
        while True:
            if self._create():
                if taken_over:
                    time.sleep(_SETTLE)
                if not taken_over or Owner.of_file(self.path) == self.me:
                    break
            owner = Owner.of_file(self.path)
            if owner is not None:
                if not self._is_left_over(owner, wait):
                    raise self._refusal(owner)
                self._remove(owner)
                taken_over = True
        self.held = True
        threading.Thread(target=self._beat, name="run folder's lock", daemon=True).start()

    def check(self) -> None:
        """Before something is written: the folder is still this run's.

        Raises:
            UsageError: another run took it, which it does when it hears nothing of this one for a long time.
        """
        if not self.held:
            return
        owner = Owner.of_file(self.path)
        if owner is None:
            logger.warning(f"{self.path} was removed while this run is alive: it is made anew")
            with contextlib.suppress(OSError):
                self._create()
        elif owner.token != self.me.token and owner.pid:
            raise UsageError(
                f"run folder {self.run_dir} was taken over by {owner} (since {owner.since}), which had heard nothing of this run "
                f"for {self.stale:.0f} s. This run ends, so that it does not write over that one's files; what it had saved is "
                "there"
            )

    def release(self) -> None:
        """Gives the folder free. Can be called at any time, more than once."""
        self._end.set()
        if self.held and os.getpid() == self.me.pid:
            self.held = False
            if Owner.of_file(self.path) == self.me:
                with contextlib.suppress(OSError):
                    self.path.unlink()

    def _create(self) -> bool:
        """False: there is a lock already."""
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        try:
            data = json.dumps(asdict(self.me)).encode()
            if os.write(handle, data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.path.unlink(missing_ok=True)
            raise
        finally:
            os.close(handle)
        return True

    def _remove(self, owner: Owner) -> None:
        """Takes a left-over lock away. Two processes may try at the same moment: what was moved is looked at again, and put back
        when it is not the lock that was found."""
        aside = self.path.with_name(f".{NAME}.{self.me.token}")
        try:
            os.rename(self.path, aside)
        except FileNotFoundError:
            return
        if Owner.of_file(aside) != owner:
            with contextlib.suppress(OSError):
                os.link(aside, self.path)
        aside.unlink(missing_ok=True)
        logger.warning(f"run folder {self.run_dir}: its lock was left over by {owner} (since {owner.since}), which is gone")

    def _is_left_over(self, owner: Owner, wait: bool) -> bool:
        if owner.is_here(self.me):
            started = process_start(owner.pid)
            if started is not None:
                return started == "" or started != owner.started
        # A machine of the same name that was started anew is the same one, or has taken its place.
        restarted = owner.host == self.me.host and owner.boot != self.me.boot
        limit = min(self.stale, 3 * self.beat) if restarted else self.stale
        if self._silence() > limit:
            return True
        return wait and self._stays_silent(owner, limit)

    def _silence(self) -> float:
        """Seconds since the last heartbeat, by the clock of the file system: the two machines' clocks may differ."""
        try:
            return _folder_time(self.run_dir) - self.path.stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def _stays_silent(self, owner: Owner, limit: float) -> bool:
        logger.warning(f"run folder {self.run_dir} is locked by {owner}: waiting for up to {limit:.0f} s for a sign of life")
        first, end = _modified(self.path), time.monotonic() + limit
        while time.monotonic() < end:
            time.sleep(min(1.0, limit / 10))
            now = _modified(self.path)
            if now is None:
                return True
            if now != first:
                return False
        return True

    def _beat(self) -> None:
        while not self._end.wait(self.beat):
            with contextlib.suppress(OSError):
                if Owner.of_file(self.path) == self.me:
                    os.utime(self.path)

    def _refusal(self, owner: Owner) -> UsageError:
        elsewhere = ""
        if not owner.is_here(self.me):
            elsewhere = f" (last sign of life {max(self._silence(), 0):.0f} s ago; after {self.stale:.0f} s it counts as gone)"
        return UsageError(
            f"run folder {self.run_dir} is in use: {owner} has had it since {owner.since or 'some time'}{elsewhere}. Wait until "
            f"it ends or stop it, or take another folder with -expn NAME; if no such process exists, remove {self.path}"
        )


def _modified(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _folder_time(folder: Path) -> float:
    """Now, by the clock that gives files in ``folder`` their times."""
    probe = folder / f".time.{secrets.token_hex(4)}"
    try:
        probe.touch()
        try:
            return probe.stat().st_mtime
        finally:
            probe.unlink(missing_ok=True)
    except OSError:
        return time.time()
