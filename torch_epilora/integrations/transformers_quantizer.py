"""transformers: EpiLoraConfig, with which ``from_pretrained`` gives a model as ``torch_epilora.patch`` makes it.

Weights become FP8 one by one as they are read, so that the 16-bit model never lies on the device as a whole. A
checkpoint that is FP8 already keeps its codes. Importing this module registers the quantizer with transformers.
"""

import copy
import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps
from transformers.quantizers import AutoHfQuantizer, HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from torch_epilora.formats.checkpoints import find_scheme, find_weights, take_weight
from torch_epilora.formats.compressed_tensors import describe
from torch_epilora.formats.files import read_header, read_json
from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.formats.schemes import Scheme
from torch_epilora.nn.convert import prepare, swap
from torch_epilora.nn.hooks import hook
from torch_epilora.nn.leftovers import warn_of_leftovers
from torch_epilora.nn.patch import EXCLUDE, check_options, read_patterns
from torch_epilora.nn.patterns import as_patterns
from torch_epilora.nn.select import check_slices, plain_path, select
from torch_epilora.nn.state import check_weights
from torch_epilora.nn.tuning import tune_at_load

logger = logging.getLogger("torch_epilora")

METHOD = "epilora"
"""Name of the quantizer in transformers, and of the options in a saved ``quantization_config``."""

_OPTIONS = ("base", "layout", "compute", "targets", "exclude", "max_adapters", "max_rank", "slices")
_OF_THE_CHECKPOINT = ("layout", "targets", "exclude")


@register_quantization_config(METHOD)
class EpiLoraConfig(QuantizationConfigMixin):
    """Options of ``patch``, for ``from_pretrained(path, quantization_config=EpiLoraConfig())`` of transformers.

    The model is the one that ``patch`` makes of ``from_pretrained(path)``, bit for bit. Of a folder that is FP8
    already, in any format that ``read_checkpoint`` reads, codes and scales are kept; it says which layers are FP8.

    Parameters
    ----------
    base : str
        "fp8".
    layout : str
        Scales of the weights: "tensor", "channel" or "block" (128x128).
    compute : str
        "w8a8" or "w8a16".
    targets : str or iterable of str, optional
        Which linears, as for ``patch``. None is all of them.
    exclude : str or iterable of str
        Which linears to leave out of ``targets``.
    max_adapters : int
        Adapter slots of each linear. 0 makes a plain FP8 model.
    max_rank : int
        Largest rank that a slot holds.
    slices : mapping of str to sequence of int, optional
        Output slices of linears that are several in one.

    Attributes
    ----------
    quant_method : str
        "epilora", the quantizer's name in transformers.

    Raises
    ------
    TypeError, ValueError
        If an option is unknown or not what is described above.
    """

    def __init__(
        self,
        base: str = "fp8",
        *,
        layout: str = "channel",
        compute: str = "w8a8",
        targets: str | Iterable[str] | None = None,
        exclude: str | Iterable[str] = EXCLUDE,
        max_adapters: int = 8,
        max_rank: int = 64,
        slices: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        check_options(base, layout, compute, max_adapters, max_rank)
        check_slices(slices or {})
        self.quant_method = METHOD
        self.base, self.layout, self.compute = base, layout, compute
        self.targets = None if targets is None else list(as_patterns("targets", targets))
        self.exclude = list(as_patterns("exclude", exclude))
        self.max_adapters, self.max_rank = max_adapters, max_rank
        self.slices = {name: list(widths) for name, widths in (slices or {}).items()}
        self._stored: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return what config.json holds as ``quantization_config``.

        Before a model is loaded, the options; of a loaded model the compressed-tensors description of its weights,
        which other libraries read, with the options under "epilora".
        """
        options = {name: copy.deepcopy(getattr(self, name)) for name in _OPTIONS}
        if self._stored is None:
            return {"quant_method": METHOD, **options}
        return {**copy.deepcopy(self._stored), METHOD: options}

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], return_unused_kwargs: bool = False, **kwargs: Any) -> Any:
        """Build the config from what ``to_dict`` returned.

        Raises
        ------
        ValueError
            If the dictionary holds other options than those of this class.
        """
        options = config_dict.get(METHOD, {k: v for k, v in config_dict.items() if k != "quant_method"})
        if not isinstance(options, dict) or not options.keys() <= set(_OPTIONS):
            raise ValueError(
                f"quantization_config: expected options of EpiLoraConfig ({', '.join(_OPTIONS)}), got {options!r}."
            )
        return super().from_dict(options, return_unused_kwargs=return_unused_kwargs, **kwargs)


@dataclass
class _Layer:
    """A linear that becomes FP8, and its dtype; of an FP8 checkpoint, how it is stored there and its tensors' keys."""

    linear: nn.Linear
    dtype: torch.dtype
    scheme: Scheme | None = None
    keys: Sequence[str] = ()


@register_quantizer(METHOD)
class EpiLoraQuantizer(HfQuantizer):
    """Lets transformers read codes and scales into the linears, or make them, and puts LoraLinear in their place.

    Parameters
    ----------
    quantization_config : EpiLoraConfig
        The options. Left as they are: the model gets a copy.
    **kwargs
        What transformers hands to every quantizer.
    """

    quantization_config: EpiLoraConfig
    pre_quantized: bool

    def __init__(self, quantization_config: EpiLoraConfig, **kwargs: Any) -> None:
        super().__init__(copy.copy(quantization_config), **kwargs)
        self.layers: dict[str, _Layer] = {}
        self._files: dict[str, str] = {}

    # --- before the weights are read -------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        files = _safetensors(checkpoint_files)
        tensors: dict[str, Tensor] = {}
        for file in files:
            found = read_header(file)
            tensors.update(found)
            self._files.update(dict.fromkeys(found, str(file)))
        # ModelOpt says so in a file of its own, which transformers does not look at: the codes would load as weights.
        if self.pre_quantized or any("float8" in str(tensor.dtype) for tensor in tensors.values()):
            self.pre_quantized = True
            self._expect_codes(model, files[0].parent, tensors)
        else:
            self._expect_weights(model)

    def _expect_weights(self, model: Any) -> None:
        """Give the linears that ``patch`` would choose a place for their scales."""
        config = self.quantization_config
        # The parameters are not tied before they are read.
        pairs = getattr(model, "all_tied_weights_keys", {}).items()
        tied = {name for pair in pairs for name in pair}
        selection = select(model, *read_patterns(config.targets, config.exclude), config.slices, tied=tied)
        for path, reason in selection.skipped.items():
            logger.info("%s is left as it is: %s.", path, reason)
        for target in selection.targets:
            linear = target.module
            self.layers[target.path] = _Layer(linear, linear.weight.dtype)
            # The weight keeps its dtype: transformers casts what it reads to that before it is quantized.
            scale = Fp8Weight.quantize(linear.weight.detach(), config.layout).scale
            linear.register_parameter("weight_scale", nn.Parameter(scale, requires_grad=False))

    def _expect_codes(self, model: Any, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Give the linears that are FP8 in the checkpoint a place for what it holds of them, as it is stored."""
        config = read_json(folder, "config.json") if (folder / "config.json").exists() else None
        scheme = find_scheme(folder, config)
        found = find_weights(folder, tensors, self._files, scheme)
        self._check_options(folder, (config or {}).get("quantization_config"))
        linears = {plain_path(name): m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
        for name, keys in found.items():
            path = _path_of(name, linears, model.base_model_prefix)
            if path is None:
                raise ValueError(
                    f"{self._files[keys[0]]}: {name}: the checkpoint has FP8 codes for it, but {type(model).__name__} "
                    "has no linear layer of that name. Use torch_epilora.load_quantized(path, model) with one that has."
                )
            linear = linears[path]
            self.layers[path] = _Layer(linear, linear.weight.dtype, scheme, keys)
            for key in keys:
                place = nn.Parameter(tensors[key], requires_grad=False)
                linear.register_parameter(key.rpartition(".")[2], place)
        if scheme.input_scale_ub is not None:
            bound = scheme.input_scale_ub
            logger.warning("input_scale_ub=%g is not applied: activations are not clipped to it.", bound)

    def _check_options(self, folder: Path, described: Any) -> None:
        """Refuse options that the checkpoint has decided otherwise."""
        default = EpiLoraConfig().to_dict()
        recorded = EpiLoraConfig.from_dict(described).to_dict() if METHOD in (described or {}) else default
        for name in _OF_THE_CHECKPOINT:
            given = getattr(self.quantization_config, name)
            if given not in (default[name], recorded[name]):
                raise ValueError(
                    f"{name}: expected {recorded[name]!r}, since {folder} is FP8 already and its codes are kept, got "
                    f"{given!r}. To choose, load the 16-bit model that it was made from."
                )

    # --- while they are read -----------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        """Say whether a tensor of the checkpoint is a weight to be made FP8."""
        return not self.pre_quantized and self._is_weight(param_name)

    def get_quantize_ops(self) -> "_Quantize":
        """Return what makes codes and scale of a weight."""
        return _Quantize(self)

    def param_element_size(self, model: Any, param_name: str, param: Tensor) -> float:
        """Return the bytes of an element on the device, by which transformers reserves memory and places layers."""
        return 1 if self._is_weight(param_name) else super().param_element_size(model, param_name, param)

    def _is_weight(self, name: str) -> bool:
        path, _, leaf = name.rpartition(".")
        return leaf == "weight" and path in self.layers

    # --- after that --------------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        config = self.quantization_config
        state = check_options(config.base, config.layout, config.compute, config.max_adapters, config.max_rank)
        weights = {path: self._take(path, layer) for path, layer in self.layers.items()}
        config._stored = describe(weights, model.state_dict())
        selection = select(model, None, (), config.slices, exact=weights.keys())
        check_weights(weights, selection)
        # Popped, so that a projection's parts are freed once they lie in its buffer.
        swap(
            prepare(
                selection.families,
                lambda target: weights.pop(target.path),
                lambda target: target.module.bias,
                state,
                config.compute,
            )
        )
        hook(model, state)
        # save_pretrained would go back to the names of the checkpoint that was read; the description has the model's.
        model._weight_conversions = []
        if not self.pre_quantized:
            warn_of_leftovers(model, *read_patterns(config.targets, config.exclude))
        self.layers.clear()
        self._files.clear()
        tune_at_load(model)
        return model

    def _take(self, path: str, layer: _Layer) -> Fp8Weight:
        """Take a layer's codes and scales out of its linear, and leave a plain one without values behind."""
        linear: Any = layer.linear
        for tensor in linear.parameters(recurse=False):
            if tensor.is_meta:
                raise NotImplementedError(
                    f"device_map: {path} is offloaded, which FP8 layers with adapter slots cannot be. Use a device_map "
                    "that keeps the whole model on GPUs, or none."
                )
            if hasattr(tensor, "device_mesh"):
                raise NotImplementedError(f"tp_plan: {path} is sharded, which is not supported. Leave tp_plan out.")
        if layer.scheme is not None:
            tensors = {key: getattr(linear, key.rpartition(".")[2]).detach() for key in layer.keys}
            name = layer.keys[0].removesuffix("weight").removesuffix(".")
            weight = take_weight(name, tensors, self._files, layer.scheme)
        elif linear.weight.dtype == torch.float8_e4m3fn:
            weight = Fp8Weight(linear.weight.detach(), linear.weight_scale.detach())
        else:  # not finite, or not in the checkpoint: transformers has initialized it then, and said so
            if not torch.isfinite(linear.weight).all():
                raise ValueError(f"{path}.weight: expected finite values, got NaN or infinity.")
            weight = Fp8Weight.quantize(linear.weight.detach(), self.quantization_config.layout)
        for leaf in linear._parameters.keys() - {"weight", "bias"}:
            delattr(linear, leaf)
        shape = (linear.out_features, linear.in_features)
        linear.weight = nn.Parameter(torch.empty(shape, dtype=layer.dtype, device="meta"), requires_grad=False)
        return weight

    # --- what the model can do afterwards ----------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Return the tensors that ``save_pretrained`` writes, and no metadata.

        Codes of one projection lie in one buffer. transformers would clone such parts on the device.
        """
        return {k: t.cpu() if t.dtype == torch.float8_e4m3fn else t for k, t in model.state_dict().items()}, {}

    def is_serializable(self) -> bool:
        """Say that ``save_pretrained`` writes the model."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Whether adapters on the model can be trained."""
        return True


class _Quantize(ConversionOps):
    """Makes codes and scale of one weight [N, K], in the dtype in which transformers read it."""

    def __init__(self, quantizer: EpiLoraQuantizer) -> None:
        self.quantizer = quantizer

    def convert(self, input_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the tensors by the names under which the model holds them.

        What is not finite stays as it is, to be refused at the end: transformers would log an error from here, and
        raise one that does not say what is wrong.
        """
        result = dict(input_dict)
        for name, value in input_dict.items():
            tensor: Tensor = value[0] if isinstance(value, list) else value
            if self.quantizer.param_needs_quantization(None, name) and torch.isfinite(tensor).all():
                path = name.rpartition(".")[0]
                weight = Fp8Weight.quantize(tensor, self.quantizer.quantization_config.layout)
                self.quantizer.layers[path].dtype = tensor.dtype
                result[name], result[f"{path}.weight_scale"] = weight.codes, weight.scale
        return result


def _safetensors(files: Sequence[str] | None) -> list[Path]:
    """Return a checkpoint's files as paths; refuse those in which codes could not be told from weights."""
    paths = [Path(file) for file in files or ()]
    if not paths or any(path.suffix != ".safetensors" for path in paths):
        got = ", ".join(sorted({path.name for path in paths})[:4]) or "a state_dict"
        raise ValueError(
            f"quantization_config: EpiLoraConfig expects a folder of safetensors files, got {got}. Load the model "
            "without it and call torch_epilora.patch(model)."
        )
    return paths


def _path_of(name: str, linears: Mapping[str, nn.Linear], prefix: str) -> str | None:
    """Return the path of the linear that a checkpoint calls ``name``, with or without the base model's prefix."""
    return next((p for p in (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if p in linears), None)


def _choose_by_argument_and_by_options() -> None:
    """Let ``from_pretrained`` take EpiLoraConfig for a folder that another tool, or this one, quantized.

    transformers refuses a config of another class than the one that config.json names, and knows no hook for it.
    """
    theirs = AutoHfQuantizer.merge_quantization_configs

    @functools.wraps(theirs)
    def merge(quantization_config: Any, quantization_config_from_args: Any) -> Any:
        if isinstance(quantization_config_from_args, EpiLoraConfig):
            return quantization_config_from_args
        if quantization_config_from_args is None and isinstance(quantization_config, dict):
            if METHOD in quantization_config:
                return EpiLoraConfig.from_dict(quantization_config)
        return theirs(quantization_config, quantization_config_from_args)

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge)


_choose_by_argument_and_by_options()
