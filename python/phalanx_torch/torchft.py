"""Groups for the manager of torchft, whose replicas train on when others die::

    import torchft
    from phalanx_torch.torchft import ProcessGroupPhalanx

    manager = torchft.Manager(pg=ProcessGroupPhalanx(), ...)
"""

import datetime
import sys
from typing import Any

from torchft.process_group import ProcessGroupWrapper  # type: ignore[import-untyped, import-not-found, unused-ignore]  # pyright: ignore[reportMissingImports]

from phalanx_torch import _uncompiled
from phalanx_torch.process_group import ProcessGroup


class ProcessGroupPhalanx(ProcessGroupWrapper):  # type: ignore[misc]
    """The replicas of one quorum as a group; ``configure`` makes another of those of the next."""

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=60)) -> None:
        super().__init__(timeout)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        return ProcessGroup(store, rank, world_size, self._timeout, f"torchft_quorum_{self._quorum_id}")

    def errored(self) -> Exception | None:
        """Why the group refuses work, or None: torchft asks before a step is committed."""
        return None if self._pg is None else self._pg.failure()

    def getBackendName(self) -> str:
        return "torchft-phalanx"


_uncompiled.skip(sys.modules[__name__])
