"""A vLLM engine with the plugin beside plain vLLM: time a token, start, KV cache, launches and answers.

    python -m benchmarks.engine --systems base vllm ours --slots 1 32 --out /tmp/engine.json
    python -m benchmarks.engine --model FOLDER --quantization "" --adapters DIR DIR --slots 3 --out /tmp/real.json
    python -m benchmarks.engine --together --out /tmp/times.json

Needs vLLM, and this package installed (vLLM finds the plugin by its entry point). Each engine is a process of its own
with empty caches, so that its start is that of a new machine. With ``--together`` all start at once and are then
measured one by one, which takes minutes less and says nothing of starts and of memory. Without ``--model`` it is one
of Qwen3-8B's shape with dummy weights and random adapters. ``base`` has no LoRA, ``vllm`` has it with the plugin off
(``vllm_dual``: under VLLM_LORA_ENABLE_DUAL_STREAM; ``vllm_torch``: with PyTorch's FP8 product in place of CUTLASS's),
``ours`` has the plugin (``ours_w8a16``: with bf16 activations).

A row says what an engine took, and under ``differs`` how far its log-probabilities are from those of ``vllm`` with as
many slots: of a token that each step is made to choose, in the first step (the prompt's) and in later ones; of freely
chosen ones until two differ; and the share of freely chosen tokens that are the same.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.layer import write
from benchmarks.timing import check_out, environment, need_gpu

SYSTEMS: dict[str, dict[str, str]] = {
    "base": {"EPILORA_VLLM": "off"},
    "vllm": {"EPILORA_VLLM": "off"},
    "vllm_dual": {"EPILORA_VLLM": "off", "VLLM_LORA_ENABLE_DUAL_STREAM": "1"},
    "vllm_torch": {"EPILORA_VLLM": "off", "VLLM_DISABLED_KERNELS": "CutlassFP8ScaledMMLinearKernel"},
    "ours": {"EPILORA_VLLM": "on"},
    "ours_w8a16": {"EPILORA_VLLM": "on", "EPILORA_VLLM_MODE": "w8a16"},
}
ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
CACHES = ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
TIMEOUT = 400
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip


def dummy(folder: Path, rank: int) -> tuple[Path, Path]:
    """Write the configuration of a model without weights, and one random adapter of all its linears."""
    from safetensors.torch import save_file

    model, adapter, c = folder / "model", folder / "adapter", QWEN3_8B
    model.mkdir()
    adapter.mkdir()
    (model / "config.json").write_text(json.dumps(c))
    hidden, q, kv, wide = c["hidden_size"], 4096, 1024, c["intermediate_size"]
    sizes = {
        "self_attn.q_proj": (hidden, q), "self_attn.k_proj": (hidden, kv), "self_attn.v_proj": (hidden, kv),
        "self_attn.o_proj": (q, hidden), "mlp.gate_proj": (hidden, wide), "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.01).bfloat16()

    tensors = {}
    for layer, (name, (k, n)) in product(range(c["num_hidden_layers"]), sizes.items()):
        path = f"base_model.model.model.layers.{layer}.{name}"
        tensors |= {f"{path}.lora_A.weight": random(rank, k), f"{path}.lora_B.weight": random(n, rank)}
    save_file(tensors, adapter / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "x", "target_modules": [name.rpartition(".")[2] for name in sizes],
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return model, adapter


class Process:
    """One engine in a process of its own, with empty caches.

    Parameters
    ----------
    system : str
        One of :data:`SYSTEMS`.
    job : dict
        What ``engine_part`` is told.
    log : Path
        Where its output goes.
    """

    def __init__(self, system: str, job: dict[str, Any], log: Path):
        self._folder, self._log = tempfile.TemporaryDirectory(prefix="engine-"), log
        self._turn, self._out = Path(self._folder.name) / "turn", Path(self._folder.name) / "out.json"
        path = Path(self._folder.name) / "job.json"
        path.write_text(json.dumps({**job, "turn": str(self._turn)}))
        caches = {name: f"{self._folder.name}/{name.lower()}" for name in CACHES}
        command = [sys.executable, "-m", "benchmarks.engine_part", str(path), str(self._out)]
        with open(log, "w") as file:
            env = {**os.environ, **ENV, **caches, **SYSTEMS[system]}
            self._process = subprocess.Popen(command, env=env, stdout=file, stderr=file)

    def started(self) -> bool:
        """Whether it waits for its turn, or has ended."""
        return self._turn.with_suffix(".ready").exists() or self._process.poll() is not None

    def result(self) -> dict[str, Any]:
        """Let it measure; what it took, or ``error`` with the log's end."""
        self._turn.with_suffix(".go").touch()
        try:
            code: object = self._process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = f"none in {TIMEOUT} s"
        found = json.loads(self._out.read_text()) if code == 0 else None
        self._folder.cleanup()
        return found or {"error": f"exit status {code}: {self._log.read_text(errors='replace')[-600:]}"}


def results(jobs: dict[tuple[str, int], dict[str, Any]], out: Path, together: bool) -> Iterator[tuple]:
    """Measure engines; each one's key and what it took."""

    def begin(key: tuple[str, int]) -> Process:
        return Process(key[0], jobs[key], out.with_suffix(f".{key[0]}-{key[1]}.log"))

    if not together:
        yield from ((key, begin(key).result()) for key in jobs)
        return
    processes = {key: begin(key) for key in jobs}
    until = time.monotonic() + TIMEOUT
    while time.monotonic() < until and not all(process.started() for process in processes.values()):
        time.sleep(0.5)
    yield from ((key, process.result()) for key, process in processes.items())


def differs(got: dict[str, list], want: dict[str, list]) -> dict[str, float]:
    """Tell two engines' answers apart: mean and largest difference of log-probabilities, share of equal tokens."""
    found: dict[str, float] = {}
    agreed = [_agreed(a, b) for a, b in zip(got["tokens"], want["tokens"], strict=True)]
    compared = {
        "first": ("forced", [slice(1)] * len(agreed)),
        "later": ("forced", [slice(1, None)] * len(agreed)),
        "free": ("logprobs", [slice(steps) for steps in agreed]),
    }
    for name, (kind, parts) in compared.items():
        both = zip(got[kind], want[kind], parts, strict=True)
        apart = [abs(x - y) for a, b, part in both for x, y in zip(a[part], b[part], strict=True)]
        found |= {f"{name}_mean": round(fmean(apart), 5), f"{name}_most": round(max(apart), 4)} if apart else {}
    same = [x == y for a, b in zip(got["tokens"], want["tokens"], strict=True) for x, y in zip(a, b, strict=True)]
    return found | {"same_tokens": round(fmean(same), 4)}


def _agreed(a: list[int], b: list[int]) -> int:
    """Steps until two answers differ."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))


def rows_of(found: dict[tuple[str, int], dict[str, Any]], head: dict[str, Any]) -> list[dict]:
    """Rows of the result: each engine's figures, without its answers."""
    rows = []
    for (system, slots), result in found.items():
        row = {**head, "system": system, "slots": slots, **{k: v for k, v in result.items() if k != "answers"}}
        other = found.get(("vllm", slots), {})
        if "answers" in result and "answers" in other and system != "vllm" and slots:
            row["differs"] = differs(result["answers"], other["answers"])
        rows.append(row)
    return rows


def told(row: dict) -> str:
    """One line of a row."""
    if "error" in row:
        return f"{row['system']} {row['slots']}: {row['error']}"
    times = f"one {median(row['one_ms']):.3f} ms, many {median(row['many_ms']):.3f} ms, first {row['first_ms']} ms"
    alone = f"start {row['start_s']} s, KV {row['kv_tokens']}, " if "start_s" in row else ""
    rest = f"{alone}same again {row['same_again']} {row.get('differs', '')}"
    return f"{row['system']} {row['slots']}: {times}, {rest}"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=list(SYSTEMS))
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 32])
    parser.add_argument("--rank", type=int, default=64, help="of the slots, and of dummy adapters")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder")
    parser.add_argument("--adapters", nargs="+", type=Path, help="PEFT folders of --model, taken in turn")
    parser.add_argument("--quantization", default="fp8", help='vLLM\'s; "" for a checkpoint that says it')
    parser.add_argument("--together", action="store_true", help="start all engines at once, sharing the GPU's memory")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    if (options.model is None) != (options.adapters is None):
        parser.error("--adapters: expected with --model, and only with it")
    if min(options.slots) < 1:
        parser.error(f"--slots: expected at least 1, but {min(options.slots)} came")
    check_out(parser, options.out)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    need_gpu()
    sources = environment()
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:
        model, adapters = options.model, options.adapters
        if model is None:
            model, adapter = dummy(Path(folder), options.rank)
            adapters = [adapter]
        head = {"model": options.model.name if options.model else "qwen3-8b", "quantization": options.quantization}
        wanted = dict.fromkeys(
            (system, 0 if system == "base" else slots) for slots, system in product(options.slots, options.systems)
        )
        jobs: dict[tuple[str, int], dict[str, Any]] = {}
        for system, slots in wanted:
            links = []
            for i in range(slots):  # adapters are told apart by their folders
                links.append(Path(folder) / f"{system}-{slots}-{i}")
                links[-1].symlink_to(adapters[i % len(adapters)].resolve())
            jobs[system, slots] = {
                "model": str(model), "quantization": options.quantization or None, "rank": options.rank,
                "dummy": options.model is None, "slots": slots, "adapters": list(map(str, links)),
                "together": options.together,
            }  # fmt: skip
        found: dict[tuple[str, int], dict[str, Any]] = {}
        for key, result in results(jobs, options.out, options.together):
            found[key] = result
            rows = rows_of(found, {**head, "rank": options.rank})
            print(told(rows[-1]), flush=True)
            write(options.out, sources, rows)
    if any("error" in row for row in rows):
        sys.exit("an engine failed: see above")


if __name__ == "__main__":
    main()
