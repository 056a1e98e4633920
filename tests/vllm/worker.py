"""What engines' workers are given: counts of the library's operators in their processes, and a drafter."""

from collections import Counter
from typing import Any

import torch

from torch_epilora.ops import reference

RAN: Counter[str] = Counter()
_library = torch.library.Library("epilora", "IMPL")


def _count(name: str) -> None:
    compute = getattr(reference, name)

    def counted(*arguments):
        RAN[name] += 1
        return compute(*arguments)

    _library.impl(name, counted, "CPU", allow_override=True)


for _name in ("lora_linear", "lora_add_"):
    _count(_name)


class Counters:
    """``worker_extension_cls`` of an engine; a call by name needs no pickled function."""

    def epilora_calls(self) -> dict[str, int]:
        """How often each operator ran in this worker."""
        return dict(RAN)


class Drafter:
    """``model`` of a ``speculative_config``: it drafts what the engine's ``additional_config`` has as ``drafts``.

    Those are pairs of a prompt and an answer. vLLM's own drafter by n-grams would find little in random tokens, and
    needs numba.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.drafts = vllm_config.additional_config["drafts"]
        self.most = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, model: object) -> None:
        """Load nothing; vLLM's CPU runner calls this of every drafter."""

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        """Draft for each request what follows the tokens that it has, the first ``lengths`` of its row."""
        return [self._draft(tokens[i, : lengths[i]].tolist()) for i in range(len(sampled))]

    def _draft(self, known: list[int]) -> list[int]:
        answer, made = next((a, len(known) - len(p)) for p, a in self.drafts if known[: len(p)] == p)
        return answer[made : made + self.most]
