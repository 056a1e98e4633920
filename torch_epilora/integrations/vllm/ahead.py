"""What an engine's batches run is compiled while it loads, by several threads.

vLLM runs each batch size once before it captures it. Our kernels of these sizes, some sixty for a Llama-like model,
would be compiled there one after the other.
"""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from torch_epilora.integrations.vllm.layers import Rows
from torch_epilora.ops.compiling import compiling_only

logger = logging.getLogger("vllm.torch_epilora")

MOST_TOKENS = 8192
"""Larger batches take no other kernels, but for layers of a few hundred outputs; they would take memory."""
MOST_THREADS = 8


def threads_of(device: torch.device, count: int) -> ThreadPoolExecutor:
    """Start threads whose current device is an engine's.

    They have no memory pool of vLLM's, whose memory its sleep takes: what kernels keep must outlive that.
    """
    if device.type == "cuda":
        return ThreadPoolExecutor(count, initializer=torch.cuda.set_device, initargs=(device,))
    return ThreadPoolExecutor(count)


def compile_ahead(model: nn.Module, most_tokens: int) -> int:
    """Compile what each kind of our layers launches for each bucket of batches, with adapters and without.

    What fails is logged, and left to the batch that needs it.

    Parameters
    ----------
    model : nn.Module
        With LoRA layers, on its device.
    most_tokens : int
        Of a batch.

    Returns
    -------
    int
        Batches that were compiled for, all kinds of layers counted.
    """
    kinds: dict[tuple, Any] = {layer.kind(): layer for layer in model.modules() if isinstance(layer, Rows)}
    if not kinds:
        return 0
    most = min(most_tokens, MOST_TOKENS)
    tokens = sorted({min(1 << i, most) for i in range(most.bit_length() + 1)})
    jobs = [(layer, m, bare) for m in tokens for layer in kinds.values() for bare in (False, True)]
    begun = time.monotonic()
    device = jobs[0][0].lora_a_stacked[0].device
    with threads_of(device, min(MOST_THREADS, len(os.sched_getaffinity(0)))) as threads:
        # one before the others: Triton's driver is found once
        done = [threads.submit(_compile, *jobs[0]).result()]
        done += threads.map(lambda job: _compile(*job), jobs[1:])
    errors = [error for error in done if error is not None]
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # vLLM measures next how much there is
    for error in dict.fromkeys(errors):
        logger.warning("Kernels that could not be compiled ahead: %s", error)
    seconds = time.monotonic() - begun
    logger.info("Kernels of %d batches of %d kinds of layers compiled in %.1f s.", len(tokens), len(kinds), seconds)
    return len(jobs) - len(errors)


@torch.inference_mode()
def _compile(layer: Any, m: int, bare: bool) -> str | None:
    """Have a layer meet m rows of which none has an adapter, though only ``bare`` says so; return what went wrong."""
    a = layer.lora_a_stacked[0]
    try:
        rows, groups = torch.arange(m, dtype=torch.int32, device=a.device), a.shape[0] + 1
        nobody = torch.full((groups,), -1, dtype=torch.int32, device=a.device)
        with compiling_only():
            layer.rehearse(m, (rows, nobody, nobody, nobody, torch.tensor([bare])))
    except Exception as error:  # whatever a compiler raises: without it the first batch compiles
        return f"{type(layer).__name__}, {m} tokens: {str(error)[:200]}"
    return None
