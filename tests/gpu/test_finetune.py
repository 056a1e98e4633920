"""Training on the GPU: `epilora finetune`'s loop, what is served of it, and the benchmark of a whole model's step."""

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from typer.testing import CliRunner

import torch_epilora as te
from benchmarks import model_training
from tests.tiny_chat import tiny_chat_model, tiny_tokenizer, write_tiny_chat_model
from torch_epilora.cli.commands import app
from torch_epilora.cli.finetune_data import encode, word_problems
from torch_epilora.cli.finetune_model import serve
from torch_epilora.cli.finetune_train import BASES, add_adapter, held_out_loss, train

SHAPE = {
    **model_training.SHAPE, "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


def test_bases_learn_alike_and_serve_what_was_trained(tmp_path):
    examples, ends = encode(tiny_tokenizer(), word_problems(32)), {}
    for base in BASES:
        model = add_adapter(tiny_chat_model(torch.bfloat16).cuda(), base, 16, 0, slots=1)
        before = held_out_loss(model, examples, batch=8, pad=0)
        losses = list(train(model, examples, steps=40, batch=8, lr=1e-2, seed=0, pad=0))
        ends[base] = held_out_loss(model, examples, batch=8, pad=0)
        assert len(losses) == 40 and ends[base] < 0.6 * before, (base, before, ends)
        inputs = {"input_ids": torch.tensor([examples[0].tokens] * 2, device="cuda")}
        with torch.no_grad():
            want = model(**inputs).logits[0].float().softmax(-1)
        model.save_pretrained(tmp_path / base)
        served = serve(model, tmp_path / base)
        with torch.no_grad(), te.adapters(served, ["tuned", None]):
            got = served(**inputs).logits.float().softmax(-1)
        near = (got[0] - want).norm() / want.norm()
        assert near < 0.1 < (got[1] - want).norm() / want.norm(), (base, near)
    assert ends["w8a16"] == pytest.approx(ends["bf16"], rel=0.15)


def test_the_command_runs(tmp_path):
    model = write_tiny_chat_model(tmp_path / "model")
    command = ["finetune", "--out", str(tmp_path / "out"), "--steps", "2", "--model", str(model)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert torch.cuda.get_device_name() in " ".join(result.output.split())


@pytest.mark.parametrize("system", model_training.SYSTEMS)
def test_a_whole_models_step_is_measured(system):
    options = model_training.parse(["--length", "512", "--rank", "16", "--warm-up", "1", "--repeat", "2"])
    row = model_training.measure(system, options, SHAPE, "cuda")
    assert 0 < row["bytes"]["resting"] < row["bytes"]["peak"] and row["ms"] > 0
    assert row["loss"] == pytest.approx(model_training.measure("bf16", options, SHAPE, "cuda")["loss"], rel=0.02)
