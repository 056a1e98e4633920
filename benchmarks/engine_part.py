"""One vLLM engine in a process of its own, as ``benchmarks.engine`` starts it: ``engine_part JOB.json OUT.json``.

A job names ``model`` (a folder), ``quantization`` (or null), whether its weights are ``dummy``, ``slots`` (0: an engine
without LoRA), ``rank``, ``adapters`` (PEFT folders, one a slot), whether engines run ``together`` on the GPU, and
``turn``: a path at which ``.ready`` says that the engine has started, and ``.go`` lets it measure. The outcome: seconds
of the start, tokens that the KV cache holds, milliseconds a token of one request and a step of many, launches a step by
kernel, and what was answered: questions by a real model, random tokens by dummy weights.
"""

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PROMPT, STEPS, REPEATS = 512, 128, 5
MANY = 32
"""Requests at once, each with the next adapter."""
SCORED, ANSWERED = 64, 16
"""Steps of each answer, and answers."""
SPREAD = 25.0
"""vLLM's dummy weights times this are about as large as a trained layer's."""
QUESTIONS = [
    f"{ask} {thing}?"
    for ask in ("What is", "Where would I find", "Why do people like", "How would you describe")
    for thing in ("honey", "a lighthouse", "the moon", "an old library")
]
PROFILED = 8
KV_BYTES = 4 << 30
"""Of each engine's KV cache where several share a GPU: more than ``MANY`` requests take."""


def start(job: dict[str, Any]) -> tuple[Any, float]:
    """An engine, and the seconds it took from its arguments to ready."""
    from vllm import LLM

    lora = {"enable_lora": True, "max_loras": job["slots"], "max_cpu_loras": job["slots"], "max_lora_rank": job["rank"]}
    # beside other engines, what is free tells nothing of what this one may take
    memory = {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": KV_BYTES} if job["together"] else {}
    begun = time.perf_counter()
    llm = LLM(
        job["model"], load_format="dummy" if job["dummy"] else "auto", quantization=job["quantization"],
        skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048, max_num_seqs=256, disable_log_stats=True,
        enable_prefix_caching=False, **(memory or {"gpu_memory_utilization": 0.85}), **(lora if job["slots"] else {}),
    )  # fmt: skip
    return llm, time.perf_counter() - begun


class Engine:
    """What is asked of an engine."""

    def __init__(self, llm: Any, job: dict[str, Any]):
        from vllm.lora.request import LoRARequest

        self.llm, vocabulary = llm, llm.llm_engine.vllm_config.model_config.get_vocab_size()
        self.loras = [LoRARequest(f"t{i}", i + 1, path) for i, path in enumerate(job["adapters"][: job["slots"]])]
        for request in self.loras:
            llm.llm_engine.add_lora(request)
        generator = torch.Generator().manual_seed(0)
        self.prompts = torch.randint(10, vocabulary, (MANY, PROMPT), generator=generator).tolist()
        self.asked = [p[: SCORED * (1 + i % 3)] for i, p in enumerate(self.prompts[:ANSWERED])]
        if job["dummy"]:
            llm.apply_model(spread)
        else:
            self.asked = questions(job["model"])

    def ask(self, prompts: list[list[int]], *, adapters: list[int | None] | None = None, **sampling: Any) -> list[Any]:
        """Answer all prompts as one batch: request i by adapter i of all, or by the one that is said."""
        from vllm import SamplingParams

        given = [SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **_own(sampling, i))
                 for i in range(len(prompts))]  # fmt: skip
        chosen = adapters if adapters is not None else list(range(len(prompts)))
        loras = [None if i is None or not self.loras else self.loras[i % len(self.loras)] for i in chosen]
        return self.llm.generate(
            [{"prompt_token_ids": p} for p in prompts],
            given,
            lora_request=loras if self.loras else None,
            use_tqdm=False,
        )

    def seconds(self, requests: int, tokens: int) -> float:
        torch.accelerator.synchronize()
        begun = time.perf_counter()
        self.ask(self.prompts[:requests], max_tokens=tokens)
        return time.perf_counter() - begun

    def step_ms(self, requests: int) -> tuple[list[float], float]:
        """Milliseconds a step of as many requests, sorted, and of the first token."""
        self.seconds(requests, 8)
        first = min(self.seconds(requests, 1) for _ in range(3))
        steps = sorted((self.seconds(requests, STEPS + 1) - first) / STEPS * 1e3 for _ in range(REPEATS))
        return [round(ms, 4) for ms in steps], round(first * 1e3, 2)

    def launches(self) -> dict[str, float]:
        """Launches of each kernel in a step of one request: those of a longer answer less those of a shorter one."""
        counts = []
        for tokens in (PROFILED, 3 * PROFILED):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                self.seconds(1, tokens)
            events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
            counts.append(Counter(event.name[:80] for event in events))
        return {name: (counts[1][name] - counts[0][name]) / (2 * PROFILED) for name in counts[1]}

    def answers(self) -> dict[str, list]:
        """What tells two engines apart, whatever tokens they choose.

        ``forced``: log-probabilities of a token that every step is made to choose, the first from the prompt alone;
        ``tokens`` and ``logprobs``: what is chosen freely. Every fifth request has no adapter.
        """
        asked: dict[str, Any] = {
            "adapters": [None if i % 5 == 4 else i for i in range(ANSWERED)],
            "max_tokens": SCORED,
            "logprobs": 0,
        }
        forced = self.ask(self.asked, **asked, allowed_token_ids=lambda i: [self.prompts[i][-1]])
        free = self.ask(self.asked, **asked)
        return {
            "forced": [_logprobs(out) for out in forced],
            "tokens": [list(out.outputs[0].token_ids) for out in free],
            "logprobs": [_logprobs(out) for out in free],
        }


def _logprobs(out: Any) -> list[float]:
    """Of each step's token."""
    answer = out.outputs[0]
    return [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]


def spread(model: torch.nn.Module) -> None:
    """Let dummy weights tell tokens apart: as they are, all logits are alike."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(1)
        elif "scale" in name or "embed" in name or "lm_head" in name:
            weight.data.mul_(SPREAD)


def questions(folder: str) -> list[list[int]]:
    """A model's tokens of what it is asked."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


def _own(sampling: dict[str, Any], i: int) -> dict[str, Any]:
    return {name: value(i) if callable(value) else value for name, value in sampling.items()}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """All of one engine."""
    llm, seconds = start(job)
    cache = llm.llm_engine.vllm_config.cache_config
    alone = {"start_s": round(seconds, 1), "kv_tokens": cache.num_gpu_blocks * cache.block_size}
    found: dict[str, Any] = {} if job["together"] else alone
    engine = Engine(llm, job)
    turn = Path(job["turn"])
    turn.with_suffix(".ready").touch()
    while not turn.with_suffix(".go").exists():
        time.sleep(0.1)
    found["answers"] = engine.answers()
    found["same_again"] = engine.answers() == found["answers"]
    found["one_ms"], found["first_ms"] = engine.step_ms(1)
    found["many_ms"], found["many_first_ms"] = engine.step_ms(MANY)
    if torch.cuda.is_available():
        found["launches"] = engine.launches()
    return found


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(measure(json.loads(Path(sys.argv[1]).read_text()))))
