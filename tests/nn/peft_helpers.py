"""PeftModels over patched models, and the PeftModel over dequantized weights that they are compared with."""

import copy

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

import torch_epilora as te
from tests.nn.helpers import ALL, dequantized, llama
from torch_epilora.integrations.peft_training import Fp8LoraLinear


def lora(r: int = 6, alpha: int = 12, targets=ALL, **options) -> LoraConfig:
    """A config whose B is not zero unless asked for."""
    targets = targets if isinstance(targets, str) else list(targets)
    return LoraConfig(
        r=r, lora_alpha=alpha, target_modules=targets, **{"init_lora_weights": False, "lora_dropout": 0.0, **options}
    )


def over_fp8(config: LoraConfig | None = None, plain: nn.Module | None = None, compute="w8a16", **options) -> PeftModel:
    """A PeftModel with one adapter over a patched model, in evaluation mode."""
    model = te.patch(copy.deepcopy(llama() if plain is None else plain), compute=compute, max_adapters=0)
    torch.manual_seed(3)
    return get_peft_model(model, config or lora(), **options).eval()


def over_plain(model: PeftModel, plain: nn.Module | None = None) -> PeftModel:
    """PEFT's own layers, with the same adapters, over fp32 weights that the codes of the patched model stand for."""
    base = dequantized(model, (llama() if plain is None else plain).float())
    names = list(model.peft_config)
    result = get_peft_model(base, copy.deepcopy(model.peft_config[names[0]]), adapter_name=names[0])
    for name in names[1:]:
        result.add_adapter(name, copy.deepcopy(model.peft_config[name]))
    for name in names:
        set_peft_model_state_dict(result, get_peft_model_state_dict(model, adapter_name=name), adapter_name=name)
    result.base_model.set_adapter(model.active_adapters)
    assert not any(isinstance(module, Fp8LoraLinear) for module in result.modules())
    return result.train(model.training)


def gradients(model: PeftModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def ours(model: nn.Module) -> dict[str, Fp8LoraLinear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Fp8LoraLinear)}
