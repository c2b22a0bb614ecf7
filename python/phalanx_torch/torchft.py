"""Groups for the manager of torchft, whose replicas train on when others die::

    import torchft
    from phalanx_torch.torchft import ProcessGroupPhalanx

    manager = torchft.Manager(pg=ProcessGroupPhalanx(), ...)
"""

import datetime
import sys
from typing import Any, cast

from torchft.process_group import ProcessGroupWrapper  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]

from phalanx_torch import _native, _uncompiled, _versions
from phalanx_torch.process_group import ProcessGroup


class _Quorum(ProcessGroup):
    """The ranks of a quorum. They meet in the store as it is: each may be in a job of its own (``init_process_group``), with a number that the
    others do not have, and torchft gives each quorum a part of a store that no other has."""

    def _first(self, store: Any, rank: int, size: int) -> Any:
        native = self._met(store, rank, size, self._timeout)
        # All are connected, and nobody else comes to this quorum. A replica that runs for weeks serves the store of many.
        _native.Group.clear_meeting(store, rank, [])
        # Each may have been started with others.
        _versions.compare(native)
        return native

    def _part(self, store: Any, ranks: list[int], timeout: datetime.timedelta, name: object) -> ProcessGroup:
        return _Quorum(store, ranks.index(self.rank()), len(ranks), timeout, name, (self, ranks))


class ProcessGroupPhalanx(ProcessGroupWrapper):  # type: ignore[misc]
    """The replicas of one quorum as a group; ``configure`` makes another of those of the next."""

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        super().__init__(timeout)
        # Why the last group was aborted, until there is another.
        self._aborted: Exception | None = None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        group = _Quorum(store, rank, world_size, self._timeout, f"torchft_quorum_{self._quorum_id}")
        self._aborted = None
        return group

    def abort(self, errored: bool = True) -> None:
        """Ends the group on every replica. With ``errored``, :meth:`errored` has the failure until the next ``configure``."""
        group = cast("_Quorum | None", self._pg)
        if errored and group is not None:
            # Known before the group is gone, for whoever asks meanwhile.
            group.abort()
            self._aborted = group.failure()
        super().abort(errored)

    def errored(self) -> Exception | None:
        """Why the group refuses work, or None: torchft asks before a step is committed."""
        group = cast("_Quorum | None", self._pg)
        return self._aborted if group is None else group.failure()

    def getBackendName(self) -> str:
        return "torchft-phalanx"


_uncompiled.skip(sys.modules[__name__])
