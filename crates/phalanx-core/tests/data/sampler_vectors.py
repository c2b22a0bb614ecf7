"""Writes sampler_vectors.json, and permutation_vectors.json of phalanx-proto: what torch's DistributedSampler and randperm give, for the tests to compare with.

    pip install torch
    python sampler_vectors.py          # the long permutations take 4 GiB of memory and a minute

The torch version used stands in the file.
"""

import json
import pathlib

import torch
from torch.utils.data.distributed import DistributedSampler

LENGTHS = [0, 1, 2, 3, 5, 10, 17, 64, 101]
WORLDS = [1, 2, 3, 4, 8]
SEEDS = [(0, 0), (0, 1), (42, 7), (2**32 - 1, 0), (2**32 - 1, 1), (2**32 + 5, 3), (2**63, 2), (2**64 - 1, 0)]
LONG = [(10_000, 2, 3, 1), (60_000, 4, 0, 5), (1_000_003, 7, 12345, 67)]
# Around the length from which torch draws 64 bits for each place.
RANDPERM = [(214748363, 5), (214748364, 5)]


def order(n, world, rank, shuffle, seed, epoch, drop_last):
    sampler = DistributedSampler(
        range(n), num_replicas=world, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    indices = list(sampler)
    assert len(sampler) == len(indices)
    return indices


def weighted_sum(values):
    """Modulo 2**64, as a signed number."""
    places = torch.arange(1, values.numel() + 1, dtype=torch.int64)
    return int((values * places).sum())


def short_cases():
    for n in LENGTHS:
        for world in WORLDS:
            for drop_last in (False, True):
                settings = [(False, 0, 0)]
                # All seeds with one length, two seeds with the others: the seed only reaches randperm.
                seeds = SEEDS if n == 17 and world == 3 else SEEDS[1:3]
                settings += [(True, seed, epoch) for seed, epoch in seeds]
                for shuffle, seed, epoch in settings:
                    yield {
                        "n": n, "world": world, "shuffle": shuffle, "seed": seed, "epoch": epoch,
                        "drop_last": drop_last,
                        "indices": [order(n, world, r, shuffle, seed, epoch, drop_last) for r in range(world)],
                    }


def long_cases():
    for n, world, seed, epoch in LONG:
        for drop_last in (False, True):
            for rank in (0, world - 1):
                indices = order(n, world, rank, True, seed, epoch, drop_last)
                yield {
                    "n": n, "world": world, "seed": seed, "epoch": epoch, "drop_last": drop_last, "rank": rank,
                    "count": len(indices), "ends": indices[:4] + indices[-4:],
                    "weighted_sum": weighted_sum(torch.tensor(indices)),
                }


def randperm_cases():
    for n, seed in RANDPERM:
        values = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
        yield {"n": n, "seed": seed, "begin": values[:4].tolist()}


def lines(cases):
    return "[\n" + ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases) + "\n]"


text = f"""{{
"torch": {json.dumps(torch.__version__)},
"short": {lines(short_cases())},
"long": {lines(long_cases())}
}}
"""
json.loads(text)
here = pathlib.Path(__file__).parent
(here / "sampler_vectors.json").write_text(text)
text = f"""{{
"torch": {json.dumps(torch.__version__)},
"randperm": {lines(randperm_cases())}
}}
"""
json.loads(text)
(here / "../../../phalanx-proto/tests/data/permutation_vectors.json").write_text(text)
