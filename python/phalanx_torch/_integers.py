"""Averages of int64, for whose sums there is no wider type."""

import torch


def shares(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Each element as how often it contains the number of ranks, and the rest: neither sum overflows. The pairs are a dimension more, the
    last, so that rows stay rows."""
    return torch.stack([tensor.div(ranks, rounding_mode="floor"), tensor.remainder(ranks)], dim=-1)


def average_of(sums: torch.Tensor, ranks: int) -> torch.Tensor:
    """The averages, rounded towards zero, of what these are the sums of :func:`shares`."""
    whole = sums[..., 0] + sums[..., 1].div(ranks, rounding_mode="floor")
    return whole + ((whole < 0) & (sums[..., 1] % ranks != 0))
