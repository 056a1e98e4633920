"""Plans timed while an engine loads, under ``EPILORA_TUNE=full``: of its own projections and batches."""

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_epilora.integrations.vllm.ahead import threads_of
from torch_epilora.integrations.vllm.bases import weights
from torch_epilora.integrations.vllm.layers import InTheEpilogue
from torch_epilora.nn.tuning import tune_projections
from torch_epilora.ops.arithmetic import next_power_of_2
from torch_epilora.ops.checks import scale_layout
from torch_epilora.ops.plan import Problem
from torch_epilora.ops.switches import TUNE, tune_mode

logger = logging.getLogger("vllm.torch_epilora")

_HOW = "the next start goes on."


def time_plans(model: nn.Module, captured: Iterable[int], most_tokens: int) -> int:
    """Time the paths of a model's FP8 layers, if ``EPILORA_TUNE=full``, and follow the fastest.

    Batches are those that vLLM captures, timed in CUDA graphs, and powers of two up to the largest, launched one by
    one. What was timed before on this GPU is not timed again. What goes wrong is logged: the engine is right without
    measured plans.

    Parameters
    ----------
    model : nn.Module
        With LoRA layers, on a GPU that runs the kernels.
    captured : iterable of int
        Sizes of the batches that vLLM captures.
    most_tokens : int
        Of a batch.

    Returns
    -------
    int
        Sizes that were timed.
    """
    modules: Iterable[Any] = model.modules()
    layers = [layer for layer in modules if isinstance(layer, InTheEpilogue)]
    if tune_mode() != "full" or not layers:
        return 0
    captured, done = list(captured), 0
    tokens = {*captured, *(1 << i for i in range(most_tokens.bit_length())), most_tokens}
    graph_tokens = next_power_of_2(max(captured)) if captured else 0  # of a bucket of which a part is captured
    device = layers[0].lora_a_stacked[0].device
    try:
        projections = dict.fromkeys(_projection(layer) for layer in layers)
        with threads_of(device, 1) as thread:
            done = thread.submit(
                tune_projections, projections, device, tokens=tokens, graph_tokens=graph_tokens, how=_HOW
            ).result()
    except Exception as error:
        logger.warning("%s=full: plans were not measured: %s", TUNE, error)
    if torch.cuda.is_initialized():
        # vLLM measures next how much there is
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
    logger.info("Plans of %d sizes were timed.", done)
    return done


def _projection(layer: Any) -> tuple[Problem, tuple[int, ...]]:
    """Make the problem of a layer's batches, and the widths of its slices."""
    weight, scale = weights(layer.base_layer)
    a, (n, k) = layer.lora_a_stacked[0], weight.shape
    slots, _, rank, _ = a.shape
    widths = tuple(b.shape[2] for b in layer.lora_b_stacked)
    problem = Problem(
        1, n, k, rank, len(widths), slots + 1, scale_layout(weight.shape, scale), layer.mode, a.dtype,
        torch.cuda.get_device_capability(a.device), layer.mode == "w8a8",
    )  # fmt: skip
    return problem, widths
