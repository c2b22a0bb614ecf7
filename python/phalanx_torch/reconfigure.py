"""Groups whose ranks change in place: PyTorch's ``enable_reconfigure``, ``_get_reconfigure_handle`` and ``_reconfigure``.

Each process has a handle, which the program brings to the others. ``reconfigure`` makes a new group of the processes whose handles it gets,
in the same ``ProcessGroup``, and ends the last one on every rank that still has it. They meet in the store with which the group was made,
so that must live on: not in a process that may die.
"""

# mypy: disable-error-code="override"
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false

import collections
import contextlib
import datetime
import hashlib
import sys
import time
import uuid
from typing import Any, NoReturn

from torch._C import _distributed_c10d as c10d

from phalanx_torch import _native, _uncompiled, _versions
from phalanx_torch._errors import Error, listed
from phalanx_torch.process_group import ProcessGroup, _call_hooks, _limit
from phalanx_torch.work import Ended, Work, ended

# The store keeps what this process has written in so many calls of `reconfigure`, the last ones. A process that comes late to one of them, with
# other handles, hears that at once, and does not wait for who has come and gone.
_KEPT = 16

# How long a wait sleeps between two looks at the store, in seconds: at first and at most, as those of the native part.
_PAUSES = (0.0001, 0.02)


class _NoRanks:
    """In place of the native part, before ``reconfigure`` has made one, and when it has failed."""

    meeting = None
    transport = None

    def is_open(self) -> bool:
        return True

    def failure(self) -> None:
        return None

    def set_timeout(self, timeout: float) -> None:
        """Nothing: ``reconfigure`` takes the group's."""

    def abort(self, cause: str) -> None:
        """Nothing: no rank waits."""

    def clear_parts(self) -> None:
        """Nothing: no part was made of it."""

    def close(self) -> None:
        """Nothing: there is nobody to say goodbye to."""

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RuntimeError(
            "phalanx: this group has no ranks yet; with enable_reconfigure=True, reconfigure() connects it before the first call, and "
            "again after a reconfigure() that has failed"
        )


class ReconfigurableGroup(ProcessGroup):
    """A group of which ``reconfigure`` says which processes are its ranks."""

    supports_reconfigure = True

    def _first(self, store: c10d.Store, rank: int, size: int) -> Any:
        _limit("the group", self._timeout)
        self._rank, self._size = rank, size
        self._handle = f"phalanx/{uuid.uuid4().hex}"
        self._uuids: set[int] = set()
        # Where this process has met others, and as which rank.
        self._meetings: collections.deque[tuple[c10d.Store, int]] = collections.deque()
        return _NoRanks()

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    # PyTorch's C++ asks by these names.
    getRank = rank
    getSize = size

    def get_reconfigure_handle(self) -> str:
        """What names this process in the ``handles`` of ``reconfigure``, for as long as the group exists."""
        return self._handle

    def reconfigure(self, opts: Any) -> Ended:
        """Makes the processes of ``opts.handles`` the ranks: in their order, if that is a list. All of them call it with the same.

        Waits until they have met. Ends the last group of this process first, with what its ranks still wait for.
        """
        if opts.hints:
            raise ValueError(f"phalanx: reconfigure takes no hints, and these are {', '.join(sorted(opts.hints))}: leave them out")
        timeout = opts.timeout or self._timeout
        _limit("reconfigure", timeout)
        handles = list(opts.handles) if isinstance(opts.handles, list) else sorted(opts.handles)
        if opts.uuid in self._uuids:
            raise RuntimeError(
                f"phalanx: reconfigure: uuid {opts.uuid} was already used in this group; each call of all ranks takes a new one"
            )
        if len(set(handles)) != len(handles) or self._handle not in handles:
            raise ValueError(
                "phalanx: reconfigure: handles has each process once, and this one among them; its own is that of get_reconfigure_handle"
            )
        self._uuids.add(opts.uuid)
        # The watcher may not have looked since the last group failed.
        _call_hooks(self)
        rank, last, self._native = handles.index(self._handle), self._native, _NoRanks()
        last.abort(f"rank {self._rank} of this group has left it with reconfigure")
        last.clear_parts()
        try:
            last.close()
        except Error:
            # Why it has failed is known to whoever has called something in it.
            pass
        store = c10d.PrefixStore(f"reconfigure/{opts.uuid}", self._store)
        self._meetings.append((store, rank))
        begin = time.monotonic()
        self._agree(store, rank, handles, timeout)
        rest = timeout - datetime.timedelta(seconds=time.monotonic() - begin)
        native = self._met(store, rank, len(handles), max(rest, datetime.timedelta(seconds=1)))
        _versions.compare(native)
        native.set_timeout(self._timeout.total_seconds())
        self._native, self._rank, self._size = native, rank, len(handles)
        self._set_sequence_number_for_group()
        while len(self._meetings) > _KEPT:
            self._clear(*self._meetings.popleft())
        return ended([], 0)

    def _clear(self, store: c10d.Store, rank: int) -> None:
        """Removes what this process wrote while it met others in ``store``, and what all wrote: a job that runs for weeks would fill the store."""
        _native.Group.clear_meeting(store, rank, ["handles", f"came/{rank}", "came", "verdict"])

    def _agree(self, store: c10d.Store, rank: int, handles: list[str], timeout: datetime.timedelta) -> None:
        """Waits until all have come with the same handles; the error of one that has come with others is everybody's, and so is that of one that
        waits no longer."""
        try:
            self._wait_for_verdict(store, rank, handles, timeout)
        except Exception:
            raise
        except BaseException:
            # A signal's handler has ended the wait. Where the store has gone, nobody waits for this rank.
            with contextlib.suppress(RuntimeError):
                store.compare_set("verdict", "", f"left/{rank}")
            raise
        verdict = bytes(store.get("verdict")).decode()
        if verdict == "refused":
            raise Error("reconfigure: the ranks have been given different handles, or in another order, for the same uuid", "mismatch")
        if verdict != "agreed":
            other = int(verdict.removeprefix("left/"))
            raise Error(
                f"reconfigure: rank {other} waits no longer for the ranks with this uuid: its time-out was over, or it was interrupted; let all ranks call "
                "reconfigure with another uuid",
                "aborted",
                other,
            )

    @staticmethod
    def _wait_for_verdict(store: c10d.Store, rank: int, handles: list[str], timeout: datetime.timedelta) -> None:
        own = hashlib.sha256("\n".join(handles).encode()).hexdigest()
        if bytes(store.compare_set("handles", "", own)).decode() != own:
            store.compare_set("verdict", "", "refused")
            return
        store.set(f"came/{rank}", "")
        if store.add("came", 1) == len(handles):
            store.compare_set("verdict", "", "agreed")
        deadline, pause = time.monotonic() + timeout.total_seconds(), _PAUSES[0]
        # PyTorch's own wait answers no Ctrl-C.
        while not store.check(["verdict"]):
            rest = deadline - time.monotonic()
            if rest > 0:
                time.sleep(min(pause, rest))
                pause = min(pause * 1.25, _PAUSES[1])
                continue
            missing = [other for other in range(len(handles)) if not store.check([f"came/{other}"])]
            # Whoever comes now does not wait for this rank; and if all have come now, it goes on.
            if bytes(store.compare_set("verdict", "", f"left/{rank}")).decode() == f"left/{rank}":
                raise Error(
                    f"reconfigure: of {len(handles)} ranks {listed(missing)} have not come with this uuid within {timeout.total_seconds():g} s",
                    "timeout",
                    missing[0] if len(missing) == 1 else None,
                )

    def _call(self, operation: str, *arguments: Any, **options: Any) -> "Ended | Work":
        self._refuse_if_failed(operation)
        return super()._call(operation, *arguments, **options)

    def _message(self, *arguments: Any) -> Work:
        self._refuse_if_failed("send or recv")
        return super()._message(*arguments)

    def _refuse_if_failed(self, operation: str) -> None:
        # In others, whoever waits learns of it. Here the program decides by the call whether to reconfigure.
        failure = self.failure()
        if failure is not None:
            how = "timed out" if failure.kind == "timeout" else "failed"
            error = Error(f"{operation}: the group has {how}, and reconfigure() makes another: {failure}", peer=failure.peer)
            # Its text says already if it was a time-out.
            error.kind = failure.kind
            raise error


_uncompiled.skip(sys.modules[__name__])
