"""Operations in flight, as PyTorch sees them."""

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx_torch import _ddp, _native
from phalanx_torch._errors import Error

_NO_SOURCE = "source_rank: this operation has received from no rank"
_NO_FUTURE_RESULT = "phalanx has no WorkResult futures: wait() raises the error, exception() returns it"
_NO_TIMEOUT = "phalanx's works do not tell their time-out: it is that of the call's options, or the group's, which is group.options._timeout"


class Ended(dist.Work):
    """An operation that ended before the call returned, with nothing left to do. The most frequent calls make one each, so it
    is made in little time: by ``ended``, without a lock and without an ``__init__`` in Python."""

    __slots__ = ("_tensors", "_sequence", "_future")
    _tensors: Any
    _sequence: int
    _future: "torch.futures.Future[Any] | None"

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return None

    def source_rank(self) -> int:
        raise RuntimeError(_NO_SOURCE)

    _source_rank = source_rank

    def result(self) -> Any:
        return self._tensors

    def get_future(self) -> "torch.futures.Future[Any]":
        if self._future is None:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_result(self._tensors)
            self._future = future
        return self._future

    def get_future_result(self) -> Any:
        raise NotImplementedError(_NO_FUTURE_RESULT)

    @property
    def timeout(self) -> datetime.timedelta:
        raise NotImplementedError(_NO_TIMEOUT)

    def _get_sequence_number(self) -> int:
        return self._sequence


def ended(tensors: Any, sequence: int) -> Ended:
    """The work of an operation that has ended."""
    work = Ended()
    work._tensors = tensors
    work._sequence = sequence
    work._future = None
    return work


# A longer limit is none: 30 years, as in the native part.
_LONGEST_TIMEOUT = 30 * 365 * 24 * 3600
_AT_ONCE = datetime.timedelta(seconds=-1)


def _seconds(timeout: object) -> float | None:
    """The limit of a wait; None if there is none. PyTorch's works take a number for seconds, too. As theirs, 0 is no limit, and of less nothing is
    waited."""
    if isinstance(timeout, datetime.timedelta):
        timeout = timeout.total_seconds()
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"wait: the time-out is a timedelta or a number of seconds, and not a {type(timeout).__name__}")
    if timeout != timeout:
        raise ValueError("wait: the time-out is NaN, which is no number of seconds: leave it out, or give a timedelta")
    if timeout == 0 or timeout > _LONGEST_TIMEOUT:
        return None
    return float(max(timeout, 0))


class Work(dist.Work):
    """One operation; ``finish`` is called once on its end, before anybody learns of it, and also if nobody waits."""

    # Set when the profiler knows of the end, if it is to know.
    _told: threading.Event | None = None
    # Whether the results have been copied back, if they are to be.
    has_copied = False

    def __init__(
        self,
        native: _native.Work | None,
        tensors: Any,
        finish: Callable[[], None] | None = None,
        sequence: int = 0,
        operation: str = "",
    ) -> None:
        super().__init__()
        # None if the operation ended before the call returned.
        self._native = native
        self._tensors = tensors
        self._finish = finish
        self._error: BaseException | None = None
        self._sequence = sequence
        self._operation = operation
        self._future: torch.futures.Future[Any] | None = None
        # A signal's handler that interrupts the copying may ask for its end, by a barrier or by leaving the group.
        self._lock = threading.RLock()
        # PyTorch refuses to write into tensors of inference mode outside of it, and a thread for callbacks is outside.
        self._is_inference = finish is not None and torch.is_inference_mode_enabled()
        if native is None:
            self._settle()
        elif finish is not None:
            # Whether results come to a program that drops its works is not to depend on how its tensors lie.
            native.when_done(self.exception, always=True)

    def _copied(self) -> BaseException | None:
        """Copies the results back; whoever comes meanwhile waits for that. Returns its error, to all, or None."""
        with self._lock:
            if self._finish is not None:
                try:
                    finish, self._finish = self._finish, None
                    with torch.inference_mode(self._is_inference), torch.no_grad():
                        finish()
                except Exception as error:
                    self._error = error
                except BaseException as interrupt:
                    # Perhaps a part has been copied: nobody may take that for the results.
                    cause = f"{self._operation}: {type(interrupt).__name__} has interrupted this rank while it copied results into tensors of the program"
                    self._error = Error(f"{cause} (make the call again, with what the tensors had before)", "aborted")
                    raise
                finally:
                    self.has_copied = True
            return self._error

    def _settle(self) -> None:
        error = self._copied()
        if error is not None:
            raise error

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        if self._native is not None:
            seconds = _seconds(timeout)
            if not self._native.wait(seconds):
                raise Error(
                    f"{self._operation}: not done after {seconds} s; it still runs, and the group's time-out ends it", "timeout"
                )
            if self._told is not None:
                # Soon, but not where the thread that tells it waits here itself.
                self._told.wait(0.2)
        self._settle()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        if self._native is not None and not self._native.is_completed():
            return False
        # Results are there for whoever learns that they are.
        self.exception()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        if self._native is not None:
            if not self._native.is_completed():
                return None
            error = self._native.error()
            if error is not None:
                return error
        return self._copied()

    def source_rank(self) -> int:
        source = None if self._native is None else self._native.source()
        if source is None:
            raise RuntimeError(_NO_SOURCE)
        return source

    _source_rank = source_rank

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def get_future(self) -> "torch.futures.Future[Any]":
        with self._lock:
            if self._future is not None:
                return self._future
            ended: torch.futures.Future[Any] = torch.futures.Future()
            # PyTorch's reducer, in C++, takes what `set_exception` sets for a result. What a callback raises is an error
            # for it too.
            future = ended.then(self._outcome)
            # If nobody can tell of the end, there is no future.
            if self._native is None or not self._native.when_done(_ddp.as_callback(lambda: ended.set_result(None))):
                ended.set_result(None)
            self._future = future
            return future

    def _outcome(self, _: object) -> Any:
        error = self.exception()
        if error is not None:
            raise error
        return self._tensors

    def get_future_result(self) -> Any:
        raise NotImplementedError(_NO_FUTURE_RESULT)

    @property
    def timeout(self) -> datetime.timedelta:
        raise NotImplementedError(_NO_TIMEOUT)

    def _get_sequence_number(self) -> int:
        return self._sequence


class Works(dist.Work):
    """Several operations, as one."""

    def __init__(self, works: Sequence[Any], tensors: Any) -> None:
        super().__init__()
        self._works = works
        self._tensors = tensors
        self._future: torch.futures.Future[Any] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        seconds = _seconds(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        for work in self._works:
            if deadline is None:
                work.wait()
            else:
                # One limit for all. Of one that is over nothing is waited, and 0 would be no limit.
                rest = deadline - time.monotonic()
                work.wait(datetime.timedelta(seconds=rest) if rest >= 0.000_001 else _AT_ONCE)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> BaseException | None:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    @property
    def timeout(self) -> datetime.timedelta:
        raise NotImplementedError(_NO_TIMEOUT)

    def result(self) -> Any:
        self.wait()
        return self._tensors

    def get_future(self) -> "torch.futures.Future[Any]":
        if self._future is None:
            tensors = self._tensors
            every = torch.futures.collect_all([work.get_future() for work in self._works])
            # `value` raises the error of an operation that failed.
            self._future = every.then(lambda done: ([one.value() for one in done.value()], tensors)[1])
        return self._future
