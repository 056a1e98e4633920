"""vLLM's LoRA layers over our operators: subclasses that keep its buffers, sharding and loading."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import (
    ColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinearWithLoRA,
)
from vllm.lora.layers.column_parallel_linear import MergedColumnParallelLinearVariableSliceWithLoRA
from vllm.model_executor.layers.linear import ReplicatedLinear

from torch_epilora.integrations.vllm.bases import codes, fp8_refusal, weights
from torch_epilora.ops.checks import MAX_SLICES
from torch_epilora.ops.plan import unsupported

OURS = (
    ColumnParallelLinearWithLoRA, MergedColumnParallelLinearWithLoRA, QKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA, MergedColumnParallelLinearVariableSliceWithLoRA, RowParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
)  # fmt: skip
"""Classes of vLLM that are replaced; of all others its own do the work."""


class Rows:
    """What both kinds of layers have in common: vLLM's buffers and batch metadata as our operators take them."""

    lora_a_stacked: tuple[Tensor, ...]
    lora_b_stacked: tuple[Tensor, ...]
    punica_wrapper: Any

    def create_lora_weights(self, max_loras: int, *more: Any, **named: Any) -> None:
        """Make the slots, and what says how much of each is used; past that vLLM has zeros, which are not read."""
        super().create_lora_weights(max_loras, *more, **named)  # type: ignore[misc]
        a = self.lora_a_stacked
        self._ranks = torch.zeros(len(a), max_loras, dtype=torch.int32, device=a[0].device)

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Put an adapter into a slot; a slice that it does not have is left as the base."""
        super().set_lora(index, lora_a, lora_b)  # type: ignore[misc]
        slices = len(self._ranks)
        parts = lora_a if isinstance(lora_a, list) else [lora_a] * slices
        ranks = [0 if part is None else part.shape[0] for part in parts]
        if len(ranks) != slices:  # one part for several slices
            ranks = [max(ranks)] * slices
        for row, rank in zip(self._ranks, ranks, strict=True):
            row[index] = rank  # a fill, which waits for nothing

    def reset_lora(self, index: int) -> None:
        """Empty a slot."""
        super().reset_lora(index)  # type: ignore[misc]
        self._ranks[:, index] = 0

    def _adapters(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor, None]:
        """View A as [slots, R, K], B as [slots, N_i, R], and ranks [slices, slots]; scaling is folded into B."""
        return [a[:, 0] for a in self.lora_a_stacked], [b[:, 0] for b in self.lora_b_stacked], [], self._ranks, None

    def _groups(self, m: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Which rows use which slot.

        vLLM's ``token_lora_mapping`` is not read: rows that a batch does not have keep other batches' entries.
        """
        wrapper = self.punica_wrapper
        meta = getattr(wrapper, "token_mapping_meta", None)
        if meta is not None:
            return (
                meta.token_indices_sorted_by_lora_ids, meta.active_lora_ids, meta.num_tokens_per_lora,
                meta.lora_token_start_loc, meta.no_lora_flag_cpu,
            )  # fmt: skip
        # vLLM on the CPU, whose batches have no rows but their own
        slots = wrapper._token_lora_indices[:m].to(torch.int32)
        groups = torch.ops.epilora.adapter_groups(slots, m, self.lora_a_stacked[0].shape[0])
        return *groups, (slots < 0).all().reshape(1)

    @staticmethod
    def _rows(x: Tensor) -> Tensor:
        """View x as [M, K], copied where its columns are apart: Mamba layers hand on what they transposed."""
        rows = x.reshape(-1, x.shape[-1])
        return rows if rows.stride(-1) == 1 else rows.contiguous()

    def kind(self) -> tuple:
        """Say what its kernels depend on beside a batch; layers of one kind share them."""
        slots = [(t.shape, t.dtype) for t in (*self.lora_a_stacked, *self.lora_b_stacked)]
        layer: nn.Module = self.base_layer  # type: ignore[attr-defined]
        own = [(name, t.shape, t.dtype) for name, t in layer.named_parameters(recurse=False)]
        return type(self), *slots, *own


class InTheEpilogue(Rows):
    """A layer over FP8 codes: one operator multiplies them and adds the adapters."""

    served_by = "FP8 operator"
    mode = "w8a8"

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute the layer's output [.., N] of x [.., K], adapters and bias in it."""
        layer: nn.Module = self.base_layer  # type: ignore[attr-defined]
        rows = self._rows(x)
        x_codes, x_scale = codes(layer, rows) if self.mode == "w8a8" else (None, None)
        y = self._linear(rows, x_codes, x_scale, bias, self._groups(rows.shape[0]))
        return y.view(*x.shape[:-1], y.shape[-1])

    def _linear(
        self, x: Tensor, x_codes: Tensor | None, x_scale: Tensor | None, bias: Tensor | None, groups: tuple[Tensor, ...]
    ) -> Tensor:
        base = weights(self.base_layer)  # type: ignore[attr-defined]
        return torch.ops.epilora.lora_linear(x, x_codes, x_scale, *base, bias, *self._adapters(), *groups, self.mode)

    def rehearse(self, m: int, groups: tuple[Tensor, ...]) -> None:
        """Run its operator once for a batch of m rows, whatever is in them, so that its kernels are there."""
        a = self.lora_a_stacked[0]
        x = a.new_empty(m, a.shape[-1])
        x_codes, x_scale = None, None
        if self.mode == "w8a8":
            x_codes, x_scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), x.new_empty(m, 1, dtype=torch.float32)
        bias = getattr(self.base_layer, "bias", None)  # type: ignore[attr-defined]
        self._linear(x, x_codes, x_scale, bias, groups)


class AfterTheBase(Rows):
    """A layer over a base that vLLM computes: one operator adds the adapters to what it wrote."""

    served_by = "adapter kernels"

    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor:
        if output.dtype != x.dtype:  # a gate that gives fp32
            return super()._apply_lora_to_output(x, output)  # type: ignore[misc]
        rows = self._rows(x)
        y = output.view(-1, output.shape[-1])
        self._add(y, rows, self._groups(rows.shape[0]))
        return output

    def _add(self, y: Tensor, x: Tensor, groups: tuple[Tensor, ...]) -> None:
        torch.ops.epilora.lora_add_(y, x, *self._adapters(), *groups)

    def rehearse(self, m: int, groups: tuple[Tensor, ...]) -> None:
        """Run its operator once for a batch of m rows, whatever is in them, so that its kernels are there."""
        a, n = self.lora_a_stacked[0], sum(b.shape[2] for b in self.lora_b_stacked)
        self._add(a.new_empty(m, n), a.new_empty(m, a.shape[-1]), groups)


def refusal(layer: nn.Module, lora_config: Any) -> str | None:
    """Say why vLLM's own kernels stay with a layer, or None."""
    from vllm import envs
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        why = unsupported(tuple(current_platform.get_device_capability()[:2]))
        if why is not None:
            return why
    elif not current_platform.is_cpu():
        return f"{current_platform.device_name}: the kernels are for CUDA"
    if envs.VLLM_BATCH_INVARIANT:
        return "VLLM_BATCH_INVARIANT: our plans differ by the number of tokens"
    if envs.VLLM_LORA_ENABLE_DUAL_STREAM:
        return "VLLM_LORA_ENABLE_DUAL_STREAM: vLLM's adapter kernels were asked for, beside its base"
    slices = len(getattr(layer, "output_sizes", ())) or 1
    if slices > MAX_SLICES:
        return f"{slices} slices are more than {MAX_SLICES}"
    whole = isinstance(layer, ReplicatedLinear) or getattr(layer, "tp_size", 1) == 1
    if lora_config.fully_sharded_loras and not whole:
        return "fully sharded adapters: vLLM communicates between shrink and expand"
    return None


def ours(original: type, kind: type, mode: str, log: Any) -> type:
    """Make the subclass of one of vLLM's classes for one kind of base.

    Parameters
    ----------
    original : type
        A class of :data:`OURS`.
    kind : type
        :class:`InTheEpilogue` or :class:`AfterTheBase`.
    mode : str
        "w8a8" or "w8a16".
    log : callable
        Told a layer's class and why it is not served, or not so.
    """

    def can_replace_layer(cls: type, source_layer: nn.Module, lora_config: Any, **more: Any) -> bool:
        if not original.can_replace_layer(source_layer=source_layer, lora_config=lora_config, **more):  # type: ignore[attr-defined]
            return False
        why = refusal(source_layer, lora_config)
        if why is None and kind is InTheEpilogue:
            why = fp8_refusal(source_layer)
        if why is not None:
            log(type(source_layer).__name__, why)
        return why is None

    return type(
        original.__name__, (kind, original), {"can_replace_layer": classmethod(can_replace_layer), "mode": mode}
    )


def classes(originals: tuple[type, ...], mode: str, log: Any) -> tuple[type, ...]:
    """Put ours before those that they stand for: vLLM takes the first class that fits."""
    found: list[type] = []
    for original in originals:
        if original in OURS:
            found += [ours(original, kind, mode, log) for kind in (InTheEpilogue, AfterTheBase)]
        found.append(original)
    return tuple(found)
