"""A port for tests and benchmarks, at which rank 0 of a group will listen. As a program it prints one."""

import contextlib
import random
import socket

# Whoever seeds the generators of the program does not seed this one.
_any = random.SystemRandom()


def free_port() -> int:
    """A port below those that the system gives to connections. One of them might be another's before rank 0 listens at it: even the other
    ranks', who try to connect to it, and then get a connection from that port to itself."""
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        first = int(file.read().split()[0])
    while True:
        port = _any.randrange(10000, first) if first > 11000 else 0
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]


if __name__ == "__main__":
    print(free_port())
