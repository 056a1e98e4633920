"""Which adapter tensor belongs to which output slice: names as in the file, fused or split, to a model's linears."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_epilora.formats.adapters import Adapter, LoraPair

FUSED_NAMES = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Names of linears that are several in one, and the names of their slices in order."""

_SHOWN = 5


@dataclass(frozen=True)
class Spot:
    """What an adapter of a linear must fit: K, the widths of its output slices, its dtype, and whether it has slots."""

    in_features: int
    widths: tuple[int, ...]
    dtype: torch.dtype
    has_slots: bool = True


@dataclass(frozen=True, eq=False)
class Part:
    """The adapter of one output slice: A [r, K], B [N_i, r], bias of B [N_i] or None, scaling."""

    a: Tensor
    b: Tensor
    b_bias: Tensor | None
    scaling: float


Key = tuple[str, int]
"""Path of a linear and number of the slice in it."""


def place(
    name: str, adapter: Adapter, spots: Mapping[str, Spot], max_rank: int, *, strict: bool = True
) -> tuple[dict[Key, Part], list[str]]:
    """Assign an adapter's tensors to output slices and check that they fit, in the linears' dtype.

    Parameters
    ----------
    name : str
        The adapter's, for errors.
    adapter : Adapter
        Modules by path; a fused name (``qkv_proj``) may stand for split linears, and split names for a fused one.
    spots : mapping of str to Spot
        The patched linears by path.
    max_rank : int
        Largest rank a slot holds.
    strict : bool
        False leaves out modules that the model does not have.

    Returns
    -------
    parts : dict
        By (path, slice).
    unmatched : list of str
        Module paths left out.

    Raises
    ------
    ValueError
        If there is no module, one is not among the linears, or a shape, rank, scaling or value does not fit.
    """
    if not adapter.modules:
        raise ValueError(f"adapter {name!r}: expected at least one module, found none.")
    parts: dict[Key, Part] = {}
    unmatched: list[str] = []
    for path, pair in adapter.modules.items():
        keys = _keys(path, spots)
        if keys is None:
            unmatched.append(path)
            continue
        for key, part in _split(name, path, pair, keys, spots, max_rank):
            if key in parts:
                raise ValueError(
                    f"adapter {name!r}: {path} and another module of it adapt the same output of {key[0]}."
                )
            parts[key] = part
    if unmatched and (strict or not parts):
        raise ValueError(
            f"adapter {name!r}: expected modules that the model has as patched linears with slots, got "
            f"{_shorten(unmatched)}; the model has {_shorten(list(spots))}. Patch those layers too (targets, exclude), "
            "or pass strict=False to leave out what has no place."
        )
    return parts, unmatched


def _keys(path: str, spots: Mapping[str, Spot]) -> list[Key] | None:
    """Return the slices that an adapter module stands for, in the order of its output rows, or None if it has none."""
    if path in spots:
        return [(path, i) for i in range(len(spots[path].widths))] if spots[path].has_slots else None
    prefix, leaf = path[: path.rfind(".") + 1], path[path.rfind(".") + 1 :]
    members = [prefix + member for member in FUSED_NAMES.get(leaf, ())]
    if members and all(m in spots and spots[m].has_slots for m in members):
        return [(m, i) for m in members for i in range(len(spots[m].widths))]
    for fused, names in FUSED_NAMES.items():
        spot = spots.get(prefix + fused)
        if leaf in names and spot is not None and spot.has_slots:
            if len(spot.widths) != len(names):
                raise ValueError(
                    f"{path}: {prefix}{fused} has {len(spot.widths)} output slices, expected {len(names)} to load "
                    f"{leaf} into one of them. Name their widths: patch(..., slices={{{fused!r}: (...)}})."
                )
            return [(prefix + fused, names.index(leaf))]
    return None


def _split(
    name: str, path: str, pair: LoraPair, keys: list[Key], spots: Mapping[str, Spot], max_rank: int
) -> list[tuple[Key, Part]]:
    """Check one module's tensors and cut them at the slices' boundaries."""
    widths = [spots[p].widths[i] for p, i in keys]
    features, dtype = spots[keys[0][0]].in_features, spots[keys[0][0]].dtype
    where = f"adapter {name!r}: {path}"
    if pair.rank > max_rank:
        raise ValueError(
            f"{where}: expected a rank of at most {max_rank}, got {pair.rank}. Patch with a larger max_rank."
        )
    if tuple(pair.a.shape) != (pair.rank, features):
        raise ValueError(f"{where}.lora_A: expected [{pair.rank}, {features}], got {list(pair.a.shape)}.")
    if tuple(pair.b.shape) != (sum(widths), pair.rank):
        raise ValueError(f"{where}.lora_B: expected [{sum(widths)}, {pair.rank}], got {list(pair.b.shape)}.")
    if pair.b_bias is not None and tuple(pair.b_bias.shape) != (sum(widths),):
        raise ValueError(f"{where}.lora_B.bias: expected [{sum(widths)}], got {list(pair.b_bias.shape)}.")
    if not math.isfinite(pair.scaling):
        raise ValueError(f"{where}: expected a finite scaling, got {pair.scaling}.")
    a, b = pair.a.detach().to(dtype), pair.b.detach().to(dtype)
    bias = None if pair.b_bias is None else pair.b_bias.detach().to(dtype)
    if not all(torch.isfinite(t).all() for t in (a, b, bias) if t is not None):
        kind = str(dtype).removeprefix("torch.")
        raise ValueError(f"{where}: expected values that {kind} can hold, got larger ones.")
    biases: tuple[Tensor | None, ...] = (None,) * len(keys) if bias is None else bias.split(widths)
    cut = zip(keys, b.split(widths), biases, strict=True)
    return [(key, Part(a, rows, bias_rows, pair.scaling)) for key, rows, bias_rows in cut]


def _shorten(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
