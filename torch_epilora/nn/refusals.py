"""Methods of a transformers model that would write or wrap FP8 codes as if they were weights."""

from typing import Any, NoReturn

from torch import nn

from torch_epilora.nn.linear import lora_linears

_INSTEAD = {
    "save_pretrained": (
        "It would leave out that the weights are FP8. Use torch_epilora.save_quantized(model, path), or unpatch(model) "
        "first."
    ),
    "load_adapter": "Use torch_epilora.load_adapter(model, name, path), and adapters() to choose it.",
    "add_adapter": (
        "Use torch_epilora.load_adapter(model, name, path) for an adapter that exists, or peft.get_peft_model(model, "
        "config) to train a new one."
    ),
}


class Refusal:
    """Stands in a patched model's instance where a method of its class would be.

    Parameters
    ----------
    method : str
        One of ``save_pretrained``, ``load_adapter`` and ``add_adapter``.
    """

    def __init__(self, method: str) -> None:
        self.method = method

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise.

        Raises
        ------
        NotImplementedError
            Always; it names what to call instead.
        """
        raise NotImplementedError(f"{self.method} is not supported by a patched model. {_INSTEAD[self.method]}")


def refuse_methods(model: nn.Module) -> None:
    """Shut the methods on every transformers model in a patched one that holds patched layers.

    A model with a quantizer was loaded with EpiLoraConfig, and its ``save_pretrained`` says that the weights are FP8.
    """
    for module in model.modules():
        if _is_pretrained(module) and lora_linears(module):
            for method in _INSTEAD:
                if method != "save_pretrained" or getattr(module, "hf_quantizer", None) is None:
                    module.__dict__[method] = Refusal(method)


def allow_methods(model: nn.Module) -> None:
    """Undo :func:`refuse_methods`."""
    for module in model.modules():
        for method in _INSTEAD:
            if isinstance(module.__dict__.get(method), Refusal):
                del module.__dict__[method]


def _is_pretrained(module: nn.Module) -> bool:
    kinds = type(module).__mro__
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in kinds)
