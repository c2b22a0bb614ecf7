"""Two ranks that reduce, gather and send NumPy's arrays, on 64-bit ARM and with the package that is installed."""

import platform
import sys

import numpy
import phalanx_torch

assert platform.machine() == (sys.argv[2] if len(sys.argv) > 2 else "aarch64"), platform.machine()
assert "site-packages" in phalanx_torch.__path__[0], phalanx_torch.__path__
group = phalanx_torch.init()
rank, world = group.rank, group.world_size
assert world == 2, f"a world of {world}"
assert group.transport == sys.argv[1], group.transport
for dtype in ["float16", "float32", "float64", "int8", "int32", "int64"]:
    # As many as pass through one message, and many times as many.
    for elements in [1, 100_003]:
        array = (numpy.arange(elements) % 50).astype(dtype)
        expected = array * 2
        group.all_reduce(array)
        assert numpy.array_equal(array, expected), (dtype, elements)
array = numpy.full(1000, rank, dtype="float32")
group.all_reduce(array, "avg")
assert (array == 0.5).all()
gathered = numpy.zeros((2, 3), dtype="int64")
group.all_gather(gathered, numpy.full(3, rank, dtype="int64"))
assert (gathered == [[0] * 3, [1] * 3]).all()
if rank == 0:
    group.send(numpy.arange(7), 1)
else:
    received = numpy.zeros(7, dtype="int64")
    group.recv(received, 0)
    assert (received == numpy.arange(7)).all()
group.barrier()
if rank == 0:
    print(f"arrays of 2 ranks over {group.transport}, Python {platform.python_version()}, NumPy {numpy.__version__}", flush=True)
group.close()
