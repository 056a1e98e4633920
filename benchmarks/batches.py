"""Whose the rows of a measured batch are, and which ranks its adapters have.

``even``: the adapters take turns. ``zipf``: an adapter's share of the rows falls with its place to the power 1.5.
``half``: one adapter has every other row, the others take turns in the rest. ``mixed``: as even, but ranks of a
sixteenth, an eighth, a quarter, a half and all of what the slots hold take turns too (8 to 128 in slots of 128).
"""

import torch

from tests.cases import Case, group_rows

KINDS = ("even", "zipf", "half", "mixed")


def row_slots(kind: str, m: int, slots: int) -> list[int]:
    """Each row's slot, the same at every call."""
    if kind == "zipf":
        shares = torch.arange(1, slots + 1, dtype=torch.float64) ** -1.5
        return torch.multinomial(shares, m, replacement=True, generator=torch.Generator().manual_seed(0)).tolist()
    if kind == "half" and slots > 1:
        return [0 if row % 2 == 0 else 1 + row // 2 % (slots - 1) for row in range(m)]
    return [row % slots for row in range(m)]


def deal(case: Case, kind: str) -> None:
    """Give a case's rows to its slots, and its adapters their ranks, as the slots of a patched model have them.

    What lies beyond a rank becomes zero: engines keep zeros there, and so do the peers here, whose kernels compute all
    of a slot.
    """
    slots, rank, _ = case.a[0].shape
    device = case.x.device
    case.row_slots = row_slots(kind, case.x.shape[0], slots)
    case.groups = group_rows(case.row_slots, slots, device=device)
    mixed = [max(rank >> (4 - slot % 5), 1) for slot in range(slots)]
    ranks = torch.tensor(mixed if kind == "mixed" else [rank] * slots, dtype=torch.int32, device=device)
    case.rank = ranks.expand(len(case.a), slots).contiguous()
    beyond = torch.arange(rank, device=device) >= ranks[:, None]
    for a, b in zip(case.a, case.b, strict=True):
        a.masked_fill_(beyond[:, :, None], 0)
        b.masked_fill_(beyond[:, None, :], 0)
