"""AdapterBank: the slots of one projection."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from torch_epilora.nn.moves import move_bits, move_value


class AdapterBank(nn.Module):
    """Adapter slots of one projection: per output slice A and B of every slot, each slot's rank and scaling.

    All are non-persistent buffers: adapters are not part of a state dict. Their addresses never change while they stay
    on one device in one dtype, so a captured CUDA graph sees an adapter that is replaced in place. Only whether there
    is a bias of B at all is fixed at its capture.

    Parameters
    ----------
    in_features : int
        K.
    widths : sequence of int
        Output features N_i of each slice.
    slots, max_rank : int
        Capacity; with 0 slots the projection is the bare base.
    dtype : torch.dtype
        Of A, B and the bias of B; that of the activations.
    device : torch.device
        Where the slots live.

    Raises
    ------
    ValueError
        If there is no memory for them.
    """

    rank: Tensor
    scaling: Tensor

    def __init__(
        self,
        in_features: int,
        widths: Sequence[int],
        slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.slots, self.max_rank, self.slices = slots, max_rank, len(widths)
        self.has_b_bias = False
        self._biased: set[int] = set()  # slots that have one
        self.captured_without_bias = False
        for i, width in enumerate(widths):
            for name, shape in (
                ("a", (slots, max_rank, in_features)),
                ("b", (slots, width, max_rank)),
                ("b_bias", (slots, width)),
            ):
                try:
                    zeros = torch.zeros(shape, dtype=dtype, device=device)
                except (RuntimeError, MemoryError) as error:
                    values = slots * ((max_rank * (in_features * len(widths) + sum(widths))) + sum(widths))
                    raise ValueError(
                        f"max_adapters, max_rank: expected slots that fit in memory, got {slots} of rank {max_rank}, "
                        f"which take {values * dtype.itemsize:,} bytes on {device} for one projection of "
                        f"{in_features} to {sum(widths)} features alone. Choose fewer or smaller ones."
                    ) from error
                self.register_buffer(f"{name}_{i}", zeros, persistent=False)
        per_slot = (len(widths), slots)
        self.register_buffer("rank", torch.zeros(per_slot, dtype=torch.int32, device=device), persistent=False)
        self.register_buffer("scaling", torch.zeros(per_slot, dtype=torch.float32, device=device), persistent=False)

    @property
    def a(self) -> list[Tensor]:
        """A of each slice, [slots, max_rank, K]."""
        return [getattr(self, f"a_{i}") for i in range(self.slices)]

    @property
    def b(self) -> list[Tensor]:
        """B of each slice, [slots, N_i, max_rank]."""
        return [getattr(self, f"b_{i}") for i in range(self.slices)]

    @property
    def b_bias(self) -> list[Tensor]:
        """Bias of B of each slice, [slots, N_i]; empty while no loaded adapter has one."""
        return [getattr(self, f"b_bias_{i}") for i in range(self.slices)] if self.has_b_bias else []

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of A and B."""
        return self.a_0.dtype  # type: ignore[return-value]

    @property
    def content_version(self) -> int:
        """Counts in-place writes to A and B."""
        return sum(t._version for t in (*self.a, *self.b))

    @torch.no_grad()
    def clear(self, slot: int) -> None:
        """Zero a slot in every slice."""
        for i in range(self.slices):
            for name in ("a", "b", "b_bias"):
                getattr(self, f"{name}_{i}")[slot].zero_()
        self.rank[:, slot] = 0
        self.scaling[:, slot] = 0
        self._biased.discard(slot)
        self.has_b_bias = bool(self._biased)

    @torch.no_grad()
    def write(self, slot: int, index: int, a: Tensor, b: Tensor, b_bias: Tensor | None, scaling: float) -> None:
        """Write one slice of a cleared slot: A [r, K], B [N_i, r], and B's bias [N_i] if the adapter has one."""
        r = a.shape[0]
        getattr(self, f"a_{index}")[slot, :r].copy_(a)
        getattr(self, f"b_{index}")[slot, :, :r].copy_(b)
        if b_bias is not None:
            getattr(self, f"b_bias_{index}")[slot].copy_(b_bias)
            self._biased.add(slot)
            self.has_b_bias = True
        self.rank[index, slot] = r
        self.scaling[index, slot] = scaling

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "AdapterBank":
        for name, tensor in self._buffers.items():
            if tensor is not None:
                moved = (move_bits if name in ("rank", "scaling") else move_value)(fn, tensor)
                self._buffers[name] = moved
        return self

    @torch.no_grad()
    def clear_all(self) -> None:
        """Zero every slot."""
        for tensor in self.buffers():
            tensor.zero_()
        self._biased.clear()
        self.has_b_bias = False
