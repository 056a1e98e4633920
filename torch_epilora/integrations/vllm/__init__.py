"""vLLM: a plugin under which its LoRA linear layers run through this library's operators (EpiLoRA section 3.2).

Installing the package registers it; ``vllm serve MODEL --enable-lora`` then uses it. Nothing of vLLM is
imported before vLLM calls :func:`register`.
"""

__all__ = ["register"]


def register() -> None:
    """Let vLLM's LoRA layers be built by this library; what the entry point ``vllm.general_plugins`` names.

    vLLM calls it once in each of its processes. It touches no GPU, and does nothing under ``EPILORA_VLLM=off``.

    Raises
    ------
    ValueError
        If a variable has a value that it does not have.
    """
    from torch_epilora.integrations.vllm.settings import read_settings

    if read_settings({}).enabled:
        from torch_epilora.integrations.vllm.load import install

        install()
