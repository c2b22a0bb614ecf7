"""Every operation of PyTorch's store client, against the server at argv[1]:argv[2]."""
import sys
import threading
from datetime import timedelta

import torch.distributed as dist

host, port = sys.argv[1], int(sys.argv[2])
short = timedelta(milliseconds=200)


def client(timeout=10.0, **options):
    return dist.TCPStore(host, port, None, False, timedelta(seconds=timeout), wait_for_workers=False, **options)


def fails(call):
    try:
        call()
    except dist.DistError as error:
        return type(error).__name__
    except RuntimeError:
        return "RuntimeError"
    raise AssertionError("it did not fail")


a, b = client(), client()
a.set("k", "v")
assert b.get("k") == b"v"
a.set("empty", "")
assert b.get("empty") == b""
assert a.add("n", 5) == 5 and b.add("n", -7) == -2 and a.get("n") == b"-2"
assert a.compare_set("c", "x", "y") == b"x" and not a.check(["c"])
assert a.compare_set("c", "", "y") == b"y" and a.compare_set("c", "x", "z") == b"y"
assert b.compare_set("c", "y", "z") == b"z"
a.append("k", "w")
assert a.get("k") == b"vw"
a.multi_set(["m1", "m2"], ["1", "2"])
a.num_keys()  # multi_set is not answered: this is, after it
assert b.multi_get(["m2", "m1"]) == [b"2", b"1"]
assert b.check(["m1", "m2"]) and b.check([]) and not b.check(["m1", "m3"])
count = a.num_keys()
assert a.delete_key("m1") and not a.delete_key("m1") and b.num_keys() == count - 1
assert sorted(a.list_keys()) == ["c", "empty", "k", "m2", "n"], a.list_keys()

# Waits: one that ends, one that is cancelled, and the client is usable afterwards.
thread = threading.Thread(target=lambda: b.wait(["w1", "w2"]))
thread.start()
a.set("w1", "")
a.add("w2", 1)
thread.join(10)
assert not thread.is_alive()
assert fails(lambda: a.wait(["k", "never"], short)) == "DistStoreError"
assert a.get("k") == b"vw"

# Queues.
a.queue_push("q", "1")
a.queue_push("q", "2")
assert a.queue_len("q") == 2 and b.check(["q"])
assert b.queue_pop("q") == b"1" and b.queue_pop("q", False) == b"2"
assert fails(lambda: b.queue_pop("q", False)) == "QueueEmptyError" and not b.check(["q"])
got = []
thread = threading.Thread(target=lambda: got.append(b.queue_pop("q")))
thread.start()
a.queue_push("q", "3")
thread.join(10)
assert got == [b"3"], got

# Barriers: alone, of two, timed out and then joined.
a.barrier("b1", 1)
thread = threading.Thread(target=lambda: b.barrier("b2", 2))
thread.start()
a.barrier("b2", 2)
thread.join(10)
assert not thread.is_alive()
assert fails(lambda: a.barrier("b3", 2, short)) == "DistStoreError"
a.barrier("b3", 2)
assert a.get("b3") == b"2"

# A refused request costs its client the connection, and nobody else anything.
a.set("text", "seven")
a.num_keys()
fails(lambda: client().add("text", 1))
assert a.clone().get("text") == b"seven"
legacy = client(use_libuv=False)
legacy.set("legacy", "1")
assert legacy.get("legacy") == b"1"
prefixed = dist.PrefixStore("p", a)
prefixed.set("x", "1")
assert a.get("p/x") == b"1"

# A whole process group of two comes up through it, with PyTorch's own start-up keys.
threads = [dist.TCPStore(host, port, 2, False, timedelta(seconds=10)) for _ in range(2)]
assert threads[0].get("k") == b"vw"
print("all done")
