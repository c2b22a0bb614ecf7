"""The clock of `phalanx bench`, for peers that are called from Python."""

import json
import math
import time
from collections.abc import Callable

# The same as in crates/phalanx-bench/src/measure.rs.
WARM_UP = (0.1, 1.0)
SETTLED = 0.1
RUN = 0.02
TIMED = 0.3
SAMPLES = (8, 30_000)
SAMPLE = 5e-6


def run(calls: int, call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - start


def measure(call: Callable[[], None], longest: Callable[[float], float]) -> float:
    """The median time of a call in seconds; `longest` gives the largest of all ranks' numbers, on every rank."""
    calls, total, before = 1, 0.0, float("inf")
    while True:
        elapsed = longest(run(calls, call))
        each = elapsed / calls
        total += elapsed
        if total > WARM_UP[1] or (total > WARM_UP[0] and abs(each / before - 1) < SETTLED):
            break
        before = each
        if elapsed < RUN:
            calls *= 2
    calls = max(1, math.ceil(SAMPLE / each))
    longest(0.0)  # all begin together
    samples = int(min(max(TIMED / (each * calls), SAMPLES[0]), SAMPLES[1]))
    times = sorted(run(calls, call) / calls for _ in range(samples))
    return longest(times[samples // 2])


def tell(size: int, seconds: float, wrong: int) -> None:
    print(json.dumps({"bytes": size, "time_us": seconds * 1e6, "wrong": wrong}), flush=True)
