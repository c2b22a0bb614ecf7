"""Checks shapes of tensors and arrays that hold the data of all ranks. Imports no PyTorch."""

import math
from collections.abc import Iterable, Sequence


def named(shape: Iterable[int]) -> str:
    """A shape as gloo's errors show it."""
    return f"({', '.join(str(length) for length in shape)})"


def check(what: str, whole: tuple[str, Sequence[int]], part: tuple[str, Sequence[int]], ranks: int, reshape: str) -> None:
    """Refuses a shape of ``whole`` that does not fit its memory, in which the elements of each rank follow those of the rank before.

    With n ranks and a ``part`` of shape (2, 3), the shapes (2n, 3), (n, 2, 3) and (6n,) fit. (2, 3n) does not. A wrong number of elements is the native
    part's error.
    """
    (name, all_ranks), (name_of_part, one_rank) = whole, part
    elements = math.prod(all_ranks)
    if len(all_ranks) < 2 or elements != ranks * math.prod(one_rank) or not elements:
        return
    before, before_in_part = list(all_ranks), list(one_rank)
    while before and before_in_part and before[-1] == before_in_part[-1]:
        before.pop()
        before_in_part.pop()
    # A dimension of one element moves none.
    if len(_without_ones(before)) < 2:
        return
    shape = list(one_rank)
    shapes = (list(all_ranks), shape), (_without_ones(all_ranks), _without_ones(shape))
    # PyTorch gives complex elements a last dimension, which both have.
    if (all_ranks[0] == ranks or len(_without_ones(before_in_part)) < 2) and not any(_is_beside(*pair, ranks) for pair in shapes):
        return
    below, further = [ranks * shape[0], *shape[1:]] if shape else [ranks], [ranks, *shape]
    raise ValueError(
        f"{what}: with {ranks} ranks and the {name_of_part} {named(one_rank)} the {name} has the shape {named(below)}, {named(further)} or "
        f"({elements}), and not {named(all_ranks)}: its elements would be in other places than this shape says. Give it one of those shapes by {reshape}"
    )


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [length for length in shape if length != 1]


def _is_beside(whole: list[int], part: list[int], ranks: int) -> bool:
    """Whether ``whole`` is the shape of as many parts as there are ranks, along or in a dimension other than the first."""
    return any(whole == [*part[:at], ranks * part[at], *part[at + 1 :]] for at in range(1, len(part))) or any(
        whole == [*part[:at], ranks, *part[at:]] for at in range(1, len(part) + 1)
    )
