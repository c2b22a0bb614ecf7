"""``python -m phalanx_torch.horovod PROGRAM ARGUMENTS``: runs a program that imports ``horovod.torch``."""

import os
import runpy
import sys

from phalanx_torch.horovod import install


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python -m phalanx_torch.horovod PROGRAM [ARGUMENTS]")
    install()
    # For processes that it starts: with "spawn" and "forkserver" they run the program's file again, such as workers of a DataLoader.
    os.environ["PHALANX_AS_HOROVOD"] = "1"
    del sys.argv[0]
    # As `python PROGRAM` has it: beside the file itself, not beside a link to it, and nothing with `-P` (Python 3.11).
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
