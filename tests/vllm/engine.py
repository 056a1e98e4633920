"""One vLLM engine in a process of its own: ``python -m tests.vllm.engine MODE.json OUT.json``.

A mode is a JSON object:

- ``model``: a checkpoint's folder;
- ``adapters``: PEFT folders by name;
- ``requests``: objects with ``prompt`` (token ids), ``adapter`` (a name or null) and ``tokens`` (how many to make);
- ``rounds``: in place of ``requests``, objects that each have some, answered in turn, and ``calls`` to make before:
  pairs of a method of ``llm.llm_engine`` and its argument, an adapter's id or an object with the arguments of a
  ``LoRARequest``, which its name stands for from there on;
- ``engine``: arguments of ``vllm.LLM`` over those of ``ENGINE``;
- ``env``: environment variables over those of ``ENV``, which ``run`` sets before the process starts;
- ``compile``: a backend of torch.compile ("eager", "inductor"), forced on the CPU, where vLLM compiles no LoRA.

The result: ``answers``, one object a request with ``tokens`` and ``logprobs`` (for each step an object from the most
likely tokens' ids to their log-probabilities); ``calls``, the plugin's counters, one entry a worker, null where there
are none; ``counters`` of vLLM's own metrics by name; ``loaded``, the ids of adapters in the engine before each round's
requests; ``seconds``. Two workers need ``VLLM_CPU_OMP_THREADS_BIND`` in ``env``, such as "0|1": a core of each.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
TOP = 20
ENV = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 16,
    "max_lora_rank": 16,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "worker_extension_cls": "tests.vllm.worker.Counters",
}


def run(mode: dict[str, Any], folder: Path, timeout: float = 300) -> dict[str, Any]:
    """Run a mode in a new process, with its log in the folder; raises with the log's end where that fails.

    Engines of neighbouring folders share caches: what vLLM finds out about a model's class takes 7 seconds, a function
    of its sampler that inductor compiles in every mode 6.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / "mode.json", folder / "out.json"]
    paths[0].write_text(json.dumps(mode, default=str))
    # The interpreter of Triton's kernels, which the other tests need, is nothing for an engine.
    outer = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    caches = folder.parent / "cache"
    ours = {"VLLM_CACHE_ROOT": str(caches / "vllm"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"), **ENV}
    command = [sys.executable, "-m", "tests.vllm.engine", *map(str, paths)]
    # vLLM leaves sockets behind, whose paths have to be short.
    with tempfile.TemporaryDirectory(prefix="epilora-") as sockets, open(folder / "log.txt", "w") as log:
        env = {**outer, **ours, "VLLM_RPC_BASE_PATH": sockets, **mode.get("env", {})}
        code = _wait(command, env, log, timeout)
    if code != 0:
        tail = (folder / "log.txt").read_text(errors="replace")[-6000:]
        raise RuntimeError(f"engine: expected exit status 0, got {code}. The end of its log:\n{tail}")
    return json.loads(paths[1].read_text())


def _wait(command: list[str], env: dict[str, str], log: IO[str], timeout: float) -> int | str:
    """Exit status of a command, or that it has none; no process that it started outlives it."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return f"none after {timeout} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answer(mode: dict[str, Any]) -> dict[str, Any]:
    """Start the mode's engine in this process and let it answer all requests of a round as one batch."""
    start = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.metrics.reader import Counter

    engine = dict(ENGINE)
    if mode["adapters"]:
        # vLLM's CPU kernels apply the last slot to rows without an adapter: one slot stays empty.
        engine |= {"enable_lora": True, "max_loras": len(mode["adapters"]) + 1}
    if "compile" in mode:
        _force_compile(mode["compile"])
        engine["enforce_eager"] = False
    imported = time.monotonic()
    llm = LLM(mode["model"], **{**engine, **mode.get("engine", {})})
    ready = time.monotonic()
    loras = {name: LoRARequest(name, i + 1, path) for i, (name, path) in enumerate(mode["adapters"].items())}
    outputs, loaded = [], []
    for turn in mode.get("rounds", [mode]):
        for method, argument in turn.get("calls", []):
            if isinstance(argument, dict):
                argument = LoRARequest(**argument)
                loras[argument.lora_name] = argument
            getattr(llm.llm_engine, method)(argument)
        loaded.append(sorted(llm.llm_engine.list_loras()) if mode["adapters"] else [])
        requests = turn["requests"]
        outputs += llm.generate(
            [{"prompt_token_ids": r["prompt"]} for r in requests],
            [SamplingParams(temperature=0, max_tokens=r["tokens"], ignore_eos=True, logprobs=TOP) for r in requests],
            lora_request=[loras.get(r["adapter"]) for r in requests],
            use_tqdm=False,
        )
    done = time.monotonic()
    return {
        "answers": [_plain(output.outputs[0]) for output in outputs],
        "calls": llm.collective_rpc("epilora_calls"),
        "counters": {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)},
        "loaded": loaded,
        "seconds": {"import": imported - start, "load": ready - imported, "generate": done - ready},
    }


def _plain(completion: Any) -> dict[str, Any]:
    """A request's tokens and log-probabilities as JSON has them."""
    steps = [{str(token): entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    return {"tokens": list(completion.token_ids), "logprobs": steps}


def _force_compile(backend: str) -> None:
    """Let the CPU platform keep VLLM_COMPILE, which it takes back with LoRA; the config reaches workers as it is."""
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(cls, vllm_config)
        config = vllm_config.compilation_config
        config.mode, config.backend = CompilationMode.VLLM_COMPILE, backend
        config.cudagraph_mode, config.compile_sizes = CUDAGraphMode.NONE, []

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


if __name__ == "__main__":
    result = answer(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
