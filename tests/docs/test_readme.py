"""The README's example runs as it stands, on a tiny model and two tiny adapters at the paths it names."""

import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1, "README.md: expected one python example"
    return blocks[0]


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", "hello", "there"])}
    vocabulary |= {f"w{i}": i for i in range(len(vocabulary), 64)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)


def _write_adapter(model_folder: Path, folder: Path) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    config = LoraConfig(r=4, lora_alpha=32, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model_folder), config).save_pretrained(folder)


def test_example_is_short():
    assert len([line for line in _example().splitlines() if line.strip()]) <= 12


def test_example_runs_and_every_row_has_its_own_adapter(tmp_path, monkeypatch, capsys):
    import torch_epilora as te

    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    _write_model(tmp_path / "path/to/model")
    for name in ("alice", "bob"):
        _write_adapter(tmp_path / "path/to/model", tmp_path / "path/to" / name)
    names: dict = {}
    exec(compile(_example(), "README.md", "exec"), names)
    assert capsys.readouterr().out.count("'hello there ") == 3

    model, batch = names["model"], names["batch"]
    with torch.no_grad():
        bare = model(**batch).logits
        with te.adapters(model, ["alice", None, "bob"]):
            mixed = model(**batch).logits
        with te.adapters(model, ["bob", "bob", "bob"]):
            bob = model(**batch).logits
    assert torch.equal(mixed[1], bare[1])
    assert torch.equal(mixed[2], bob[2])
    assert not torch.allclose(mixed[0], bare[0], atol=0.1)
    assert not torch.allclose(mixed[0], mixed[2], atol=0.1)
