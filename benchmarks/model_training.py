"""A training step of a whole model of Qwen3-8B's shape with LoRA, on FP8 bases beside PEFT on bf16: time and memory.

    python -m benchmarks.model_training --out /tmp/model_training.json
    python -m benchmarks.model_training --sequences 4 --length 2048 --out /tmp/model_training_4.json

Random weights, rank 64 on all seven linears of a layer, 8,192 tokens, gradient checkpointing by layer, eager. A step is
forward, backward and AdamW on the adapters. The loss is that of 256 positions in all, the last ones of each sequence,
in every system: the head and the cross entropy of all 8,192 positions would hide what the linears take. Systems:

``bf16``           PEFT on bf16 weights, adapters in bf16 (``autocast_adapter_dtype=False``)
``bf16_masters``   the same with fp32 adapters, PEFT's default
``w8a16``          PEFT on a patched model, adapters in bf16
``w8a16_masters``  the same with fp32 adapters
``w8a8``           ``w8a16`` with a forward on FP8 activations

Each is a process of its own, so that its memory is. A row has every step's milliseconds, host time included, and their
median; the bytes of the frozen linears (codes and scales), of embeddings and head, and of the rest; what is allocated
between two steps (base, adapters, AdamW's moments) and at most within one; and the first step's loss, before any
adapter counts.
"""

import argparse
import multiprocessing
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import torch_epilora as te
from benchmarks.layer import write
from benchmarks.timing import check_out, environment, need_gpu
from torch_epilora.nn.linear import LoraLinear

SHAPE = {
    "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}  # fmt: skip
SYSTEMS: dict[str, tuple[str | None, bool]] = {
    "bf16": (None, False),
    "bf16_masters": (None, True),
    "w8a16": ("w8a16", False),
    "w8a16_masters": ("w8a16", True),
    "w8a8": ("w8a8", False),
}
"""By name: what the patched model computes with, and whether adapters are in fp32."""
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LOSS_POSITIONS, RATE = 256, 1e-4


def build(system: str, rank: int, shape: Mapping[str, Any], device: str) -> Any:
    """A PeftModel with random weights, made where they stay; the same weights in every system."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, Qwen3Config

    compute, masters = SYSTEMS[system]
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.bfloat16)
    if compute is not None:
        te.patch(model, base="fp8", compute=compute, max_adapters=0)
    torch.manual_seed(0)
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=rank, target_modules=LINEARS)
    peft_model = get_peft_model(model, config, autocast_adapter_dtype=masters)
    peft_model.gradient_checkpointing_enable({"use_reentrant": False})
    return peft_model.train()


def frozen_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of what is not trained: the linears under adapters, embeddings with the head, and the rest."""
    found = dict.fromkeys(("linears", "embeddings", "rest"), 0)
    linears = [module.get_base_layer() for module in model.modules() if hasattr(module, "get_base_layer")]
    seen = set()
    for linear in linears:
        scale = [linear.weight_scale] if isinstance(linear, LoraLinear) else []
        for tensor in (linear.weight, *scale):
            found["linears"] += tensor.nbytes
            seen.add(tensor.untyped_storage().data_ptr())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.requires_grad and tensor.untyped_storage().data_ptr() not in seen:
            found["embeddings" if "embed_tokens" in name or "lm_head" in name else "rest"] += tensor.nbytes
    return found


def measure(system: str, options: argparse.Namespace, shape: Mapping[str, Any] = SHAPE, device: str = "cuda") -> dict:
    """One row."""
    model = build(system, options.rank, shape, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, fused=True)
    draw = torch.Generator(device).manual_seed(0)
    tokens, wanted = (
        torch.randint(shape["vocab_size"], size, generator=draw, device=device)
        for size in ((options.sequences, options.length), (LOSS_POSITIONS,))
    )
    kept = LOSS_POSITIONS // options.sequences
    cuda = device == "cuda"

    def step() -> float:
        logits = model(input_ids=tokens, use_cache=False, logits_to_keep=kept).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), wanted)
        del logits
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()  # waits for the step

    losses = [step() for _ in range(options.warm_up)]
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        resting = torch.cuda.memory_allocated()
    times = []
    for _ in range(options.repeat):
        begin = time.perf_counter()
        step()
        if cuda:
            torch.cuda.synchronize()
        times.append(round((time.perf_counter() - begin) * 1e3, 2))
    memory = {"resting": resting, "peak": torch.cuda.max_memory_allocated()} if cuda else {}
    return {
        "model": "qwen3-8b", "system": system, "sequences": options.sequences, "length": options.length,
        "rank": options.rank, "ms": median(times), "samples_ms": times, "loss": round(losses[0], 5),
        "bytes": {**frozen_bytes(model), "adapters": sum(p.nbytes for p in parameters), **memory},
    }  # fmt: skip


def told(row: dict) -> str:
    """One line of a row."""
    sizes = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in row["bytes"].items())
    return f"{row['system']:13s} {row['ms']:8.1f} ms a step, loss {row['loss']:.4f}, {sizes}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--sequences", type=int, default=1)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=2, help="steps before the first that is timed")
    parser.add_argument("--repeat", type=int, default=5, help="steps that are timed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name in ("sequences", "length", "rank", "warm_up", "repeat"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected at least 1, but {getattr(options, name)} came")
    if LOSS_POSITIONS % options.sequences or LOSS_POSITIONS // options.sequences > options.length:
        parser.error(
            f"--sequences: expected a divisor of the loss's {LOSS_POSITIONS} positions, which fit in them, but "
            f"{options.sequences} of {options.length} came"
        )
    check_out(parser, options.out)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    need_gpu()
    sources, rows, failed = environment(), [], False
    spawn = multiprocessing.get_context("spawn")
    for system in options.systems:
        with ProcessPoolExecutor(1, spawn) as alone:
            try:
                rows.append(alone.submit(measure, system, options).result())
            except Exception as error:  # out of memory, say: the others are still worth measuring
                rows.append({"system": system, "error": f"{type(error).__name__}: {str(error)[:300]}"})
                failed = True
        print(told(rows[-1]) if "error" not in rows[-1] else f"{system}: {rows[-1]['error']}", flush=True)
        if options.out is not None:
            write(options.out, sources, rows)
    if failed:
        sys.exit("a system failed: see above")


if __name__ == "__main__":
    main()
