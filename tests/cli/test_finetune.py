"""`epilora finetune`: labels on answers alone, a training that changes the adapter alone, and what is served."""

import importlib.util
import json

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from rich.console import Console
from typer.testing import CliRunner

import torch_epilora as te
from tests.tiny_chat import tiny_chat_model, tiny_tokenizer, write_tiny_chat_model
from torch_epilora.cli import finetune, finetune_data, finetune_model, finetune_train
from torch_epilora.cli.commands import app

CHATS = [
    [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for question, answer in (("a?", "yes"), ("what?", "no, never"), ("why so?", "so"), ("b?", "yes"))
]
OPTIONS = {"steps": 8, "batch": 2, "lr": 2e-2, "seed": 0, "pad": 0}


@pytest.mark.parametrize("largest", [12, 49, 999])
def test_word_problems_are_right_different_and_decided_by_the_seed(largest):
    chats = finetune_data.word_problems(200, seed=1, largest=largest)
    assert chats == finetune_data.word_problems(200, 1, largest) != finetune_data.word_problems(200, 2, largest)
    assert len({question["content"] for question, _ in chats}) == 200
    for question, answer in chats:
        found = json.loads(answer["content"])
        working, result = found["working"].split(" = ")
        a, sign, b = working.split()
        assert {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign] == found["answer"] > 0
        assert str(found["answer"]) == result and all(w in question["content"] for w in (a, b, found["unit"]))


def test_both_forms_of_data_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    messages = [{"role": "system", "content": "s"}, *CHATS[1]]
    lines = [json.dumps({"prompt": "a?", "completion": "yes", "more": 1}), "", json.dumps({"messages": messages})]
    path.write_text("\n".join(lines))
    assert finetune_data.read_chats(path) == [CHATS[0], messages]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: expected .* got no JSON"),
        ("[1]", "line 2: expected .* got list"),
        (r'{"prompt": "\ud800", "completion": "a"}', "line 2: expected .* got no JSON: .*surrogates not allowed"),
        ('{"prompt": "a"}', r"line 2: expected .* got the keys \['prompt'\]"),
        ('{"prompt": "a", "completion": ""}', "Both texts are needed"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "messages: expected at least two"),
        ('{"messages": [{"role": "tool", "content": "a"}, {"role": "assistant", "content": "b"}]}', "Other roles"),
        ('{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]}', "of the assistant as"),
        ("", "expected at least 2 lines, .* got 1"),
    ],
)
def test_bad_data_is_refused_with_its_line(tmp_path, line, message):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n" + line)
    with pytest.raises(ValueError, match=message):
        finetune_data.read_chats(path)


def test_separators_that_are_no_line_s_end_stay_in_texts(tmp_path):
    path, text = tmp_path / "data.jsonl", "a\u2028b\x85c"
    path.write_bytes(
        "\r\n".join(json.dumps({"prompt": text, "completion": text}, ensure_ascii=False) for _ in range(2)).encode()
    )
    assert finetune_data.read_chats(path) == [finetune_data._chat(text, text)] * 2


@pytest.mark.parametrize("template", ["{{ raise_exception('no system here') }}", "{{ broken"])
def test_what_the_chat_template_does_not_take_is_refused(template):
    with pytest.raises(ValueError, match=r"chat 1 \(.*\): expected messages that the tokenizer's chat template takes"):
        finetune_data.encode(tiny_tokenizer(template), CHATS)


@pytest.mark.parametrize("template", [True, False])
def test_only_the_answers_tokens_have_labels(template):
    tokenizer = tiny_tokenizer() if template else tiny_tokenizer(None)
    batch = finetune_data.collate(finetune_data.encode(tokenizer, CHATS), pad=0)
    assert {value.dtype for value in batch.values()} == {torch.int64}
    for row, chat in enumerate(CHATS):
        ids, mask, labels = (batch[name][row] for name in ("input_ids", "attention_mask", "labels"))
        prompt = f"<user>{chat[0]['content']}\n<assistant>" if template else f"{chat[0]['content']}\n"
        assert tokenizer.decode(ids[mask.bool()]) == f"{prompt}{chat[1]['content']}<eos>"
        assert tokenizer.decode(labels[labels != -100]) == f"{chat[1]['content']}<eos>"
        assert (labels[labels != -100] == ids[labels != -100]).all() and (ids[~mask.bool()] == 0).all()


def test_a_chat_longer_than_the_model_takes_is_refused():
    with pytest.raises(ValueError, match=r"chat 2 \('what\?'\.\.\.\): expected at most 25 tokens"):
        finetune_data.encode(tiny_tokenizer(), CHATS, longest=25)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="tokenizer: expected an eos_token"):
        finetune_data.encode(tokenizer, CHATS)


def test_every_epoch_has_every_example_once():
    learnt, held_out = finetune_data.split(range(21))
    assert held_out == [0, 10, 20] and len(learnt) == 18 and not set(learnt) & set(held_out)
    examples = [finetune_data.Example([i], 0) for i in range(6)]
    some = [
        row.tokens[0] for _, rows in zip(range(6), finetune_data.batches(examples, 4, 0), strict=False) for row in rows
    ]
    assert [sorted(some[i : i + 6]) for i in (0, 6, 12, 18)] == [list(range(6))] * 4
    assert some[:6] != some[6:12]
    assert len(next(finetune_data.batches(examples, 16, 0))) == 16, "a batch may be larger than an epoch"


def trained(base: str, **options):
    examples = finetune_data.encode(tiny_tokenizer(), CHATS)
    model = finetune_train.add_adapter(tiny_chat_model(), base, 4, 3, slots=1)
    frozen = {n: p.clone() for n, p in model.state_dict().items() if "lora_" not in n}
    first = {n: p.clone() for n, p in model.named_parameters() if p.requires_grad}
    losses = list(finetune_train.train(model, examples, **{**OPTIONS, **options}))
    return model, frozen, first, losses


@pytest.mark.parametrize("base", finetune_train.BASES)
def test_training_lowers_the_loss_and_changes_the_adapter_alone(base):
    model, frozen, first, losses = trained(base)
    assert len(losses) == 8 and losses[-1] < 0.95 * losses[0]
    state = model.state_dict()
    for name, tensor in frozen.items():
        assert torch.equal(tensor.view(torch.uint8), state[name].view(torch.uint8)), name
    assert len(first) == 2 * 7 * 2 and all(not torch.equal(p, state[n]) for n, p in first.items())


def test_every_base_starts_with_the_same_adapter_and_sees_the_same_batches():
    _, _, first, losses = trained("bf16")
    for base in ("w8a16", "w8a8"):
        _, _, other, found = trained(base)
        assert list(other) == list(first) and all(torch.equal(other[name], first[name]) for name in first)
        assert found == pytest.approx(losses, rel=0.1) and found != losses
    assert trained("bf16")[3] == losses


def test_a_loss_that_is_not_finite_stops_the_training():
    with pytest.raises(ValueError, match=r"lr 1e\+30: expected a finite loss, got nan at step"):
        trained("bf16", lr=1e30)


def test_the_learning_rate_goes_up_and_then_down():
    shares = [finetune_train._share(step, 20) for step in range(20)]
    assert shares[:2] == [0.5, 1.0] and shares[2] == 1.0 and shares[2:] == sorted(shares[2:], reverse=True)
    assert 0 < shares[-1] < 0.02 and finetune_train._share(0, 1) == 1


def test_held_out_loss_counts_every_token_the_same():
    examples = finetune_data.encode(tiny_tokenizer(), CHATS)
    model = tiny_chat_model()
    total = tokens = 0.0
    for example in examples:
        logits = model(torch.tensor([example.tokens])).logits[0, example.prompt - 1 : -1].detach()
        answer = torch.tensor(example.tokens[example.prompt :])
        total += float(torch.nn.functional.cross_entropy(logits, answer, reduction="sum"))
        tokens += len(answer)
    assert finetune_train.held_out_loss(model, examples, batch=3, pad=0) == pytest.approx(total / tokens, rel=1e-5)


@pytest.mark.parametrize("base", ["w8a16", "bf16"])
def test_what_is_served_is_what_was_trained(base, tmp_path):
    model, *_ = trained(base)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8]] * 2)}
    with torch.no_grad():
        want = model.eval()(**inputs).logits[0]
        with model.disable_adapter():
            bare = model(**inputs).logits[0]
    model.save_pretrained(tmp_path)
    served = finetune_model.serve(model, tmp_path)
    with torch.no_grad(), te.adapters(served, ["tuned", None]):
        got = served(**inputs).logits
    # a bf16 base is rounded to FP8 once it is served
    near = 1e-4 if base == "w8a16" else 0.08
    assert (got[0] - want).norm() < near * want.norm() and (got[1] - bare).norm() < near * bare.norm()
    assert (want - bare).norm() > 0.5 * bare.norm()


def test_the_command_trains_saves_draws_and_serves(tmp_path):
    pytest.importorskip("matplotlib")
    from peft import PeftModel

    folder, out, data = write_tiny_chat_model(tmp_path / "model"), tmp_path / "a" / "b", tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"messages": chat}) for chat in CHATS * 3))
    command = ["finetune", "--out", str(out), "--steps", "3", "--model", str(folder), "--data", str(data)]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    for text in ("3/3", "with the adapter", "bare base", "3 steps on w8a16", "loss of 2 held-out answers", "loss.png"):
        assert text in result.output, text
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = PeftModel.from_pretrained(tiny_chat_model(), out).peft_config["default"]
    assert (config.r, config.lora_alpha) == (16, 32) and not list(out.glob("*.bin"))
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1 and "expected a folder without an adapter" in again.output


def test_the_command_says_what_is_wrong(tmp_path):
    quantized = write_tiny_chat_model(tmp_path / "quantized")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    for arguments, why in (
        (["--model", str(quantized)], "got ValueError: one that is quantized already"),
        (["--model", str(tmp_path)], "expected the folder of a causal LM in safetensors with its tokenizer"),
        (["--data", str(tmp_path / "empty.jsonl")], "expected at least 2 lines"),
    ):
        (tmp_path / "empty.jsonl").write_text("")
        result = CliRunner().invoke(app, ["finetune", "--out", str(tmp_path / "out"), *arguments])
        assert result.exit_code == 1 and why in result.output and "Traceback" not in result.output
        assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, ["finetune"]).exit_code == 2


@pytest.mark.parametrize("base", ["w8a16", "bf16"])
def test_a_model_that_cannot_be_served_is_refused_before_it_is_trained(base, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, out = write_tiny_chat_model(tmp_path / "model"), tmp_path / "out"
    config = GPT2Config(vocab_size=258, n_embd=32, n_layer=1, n_head=2, n_positions=256, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    command = ["finetune", "--out", str(out), "--model", str(folder), "--steps", "1", "--base", base]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 1 and "Conv1D" in result.output and not out.exists()


def test_a_last_step_that_breaks_the_adapter_saves_nothing(tmp_path):
    folder = write_tiny_chat_model(tmp_path / "model")
    out, command = tmp_path / "out", ["finetune", "--model", str(folder), "--steps", "1", "--lr", "1e30"]
    result = CliRunner().invoke(app, [*command, "--out", str(out)])
    assert result.exit_code == 1 and "expected a finite loss after the last step, got nan" in result.output
    assert not list(out.iterdir())


def test_a_model_that_lacks_tokens_or_half_of_its_file_is_refused(tmp_path):
    folder, out = write_tiny_chat_model(tmp_path / "model"), tmp_path / "out"
    model = tiny_chat_model()
    model.resize_token_embeddings(100)
    for why in ("expected an embedding for every token of its tokenizer, got 100", "got SafetensorError"):
        if why.startswith("expected"):
            model.save_pretrained(folder)
        else:
            (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
        result = CliRunner().invoke(app, ["finetune", "--out", str(out), "--model", str(folder)])
        assert result.exit_code == 1 and why in " ".join(result.output.split()), result.output
        assert not out.exists()


def test_without_matplotlib_the_curve_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "matplotlib is not installed" in finetune.draw_losses([1.0], tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


def test_texts_of_a_model_are_shown_as_they_are():
    console = Console(width=100, record=True)
    console.print(finetune._answers(CHATS[:1], [("[bold]x[/bold]", "y\nz")]))
    shown = console.export_text()
    assert "[bold]x[/bold]" in shown and "y z" in shown
