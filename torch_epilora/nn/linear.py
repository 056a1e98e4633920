"""LoraLinear: what stands where an nn.Linear stood."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from torch_epilora.formats.fp8 import check_scale_values
from torch_epilora.ops.checks import scale_layout

if TYPE_CHECKING:
    from torch_epilora.nn.group import ProjectionGroup


class LoraLinear(nn.Linear):
    """An FP8 linear with adapter slots, under the name and with the attributes of the ``nn.Linear`` it replaces.

    It owns no tensor: codes, scales, bias and slots live in the :class:`ProjectionGroup` that it shares with the
    linears that read the same input (q, k and v). ``weight`` (e4m3 [N, K]), ``weight_scale`` (fp32), ``input_scale``
    (fp32 [1] or None) and ``bias`` ([N] or None) are views of it; ``state_dict`` has them as this module's own.

    Parameters
    ----------
    group : ProjectionGroup
        Computes it. The first member registers it as a submodule, so that it moves and copies with the model.
    index : int
        Which member of the group this is.
    """

    group: "ProjectionGroup"

    def __init__(self, group: "ProjectionGroup", index: int) -> None:
        nn.Module.__init__(self)
        self.index = index
        self.in_features = group.in_features
        self.out_features = group.members[index].width
        if index == 0:
            self.group = group
        else:
            self.__dict__["group"] = group

    @property
    def path(self) -> str:
        """Path of the module in the patched model."""
        return self.group.members[self.index].path

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """e4m3 codes [N, K]."""
        return self.group.member_codes(self.index)

    @property
    def weight_scale(self) -> Tensor:
        """fp32 scale: [1], [N, 1] or [ceil(N/128), ceil(K/128)]."""
        return self.group.member_scale(self.index)

    @property
    def input_scale(self) -> Tensor | None:
        """Static activation scale of the checkpoint, fp32 [1], or None."""
        return self.group.member_input_scale(self.index)

    @property
    def bias(self) -> Tensor | None:  # type: ignore[override]
        """[N] in the activations' dtype, or None."""
        return self.group.member_bias(self.index)

    def forward(self, x: Tensor) -> Tensor:
        """Apply base and adapters: [..., K] to [..., N] in x's dtype.

        Raises
        ------
        ValueError
            If x does not end in K features or its rows do not fit the batch of ``adapters()``.
        TypeError
            If x has another dtype than the module.
        """
        return self.group.project(x, self.index)

    def extra_repr(self) -> str:
        """Sizes, layout of the scales, what multiplies, capacity for adapters, and the linears that run along."""
        group, bank = self.group, self.group.bank
        others = [m.path.rpartition(".")[2] for i, m in enumerate(group.members) if i != self.index and group.fused]
        fused = f", fused with {' and '.join(others)}" if others else ""
        layout = scale_layout(group.codes.shape, group.full_scale())
        return (
            f"{super().extra_repr()}, layout={layout}, compute={group.compute}, slots={bank.slots}, "
            f"max_rank={bank.max_rank}{fused}"
        )

    def _tensors(self) -> dict[str, Tensor]:
        named = {n: getattr(self, n) for n in ("weight", "weight_scale", "input_scale", "bias")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, tensor in self._tensors().items():
            destination[prefix + name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = self._tensors()
        found: dict[str, Tensor] = {}
        for name, tensor in own.items():
            value = state_dict.get(prefix + name)
            if value is None:
                missing_keys.extend([prefix + name] if strict else [])
            elif value.shape != tensor.shape or (name != "bias" and value.dtype != tensor.dtype):
                error_msgs.append(
                    f"{prefix}{name}: expected {_describe(tensor)}, got {_describe(value)}. A state dict of a patched "
                    "model has FP8 codes and their scales; patch() takes plain weights."
                )
            else:
                found[name] = value
                if name.endswith("_scale"):
                    try:
                        check_scale_values(prefix + name, value, zero=name == "weight_scale")
                    except ValueError as error:
                        error_msgs.append(str(error))
        if strict:
            leaves = (key[len(prefix) :] for key in state_dict if key.startswith(prefix))
            unexpected_keys.extend(prefix + leaf for leaf in leaves if leaf not in own)
        if ("weight" in found) != ("weight_scale" in found):
            error_msgs.append(f"{prefix}weight and {prefix}weight_scale: expected both or neither, got one of them.")
        elif found and not error_msgs:
            self.group.load_member(self.index, found, assign=bool(local_metadata.get("assign_to_params_buffers")))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LoraLinear":
        # Members of a group move together; a second call with the same function finds nothing left to do.
        self.group._apply(fn, recurse)
        return self


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def groups_of(linears: Mapping[str, LoraLinear]) -> list["ProjectionGroup"]:
    """Return the groups of some linears, each once, in their order."""
    return list({id(m.group): m.group for m in linears.values()}.values())


def lora_linears(model: nn.Module) -> dict[str, "LoraLinear"]:
    """Return the patched linears of a model by the path they were patched under."""
    return {m.path: m for m in model.modules() if isinstance(m, LoraLinear)}
