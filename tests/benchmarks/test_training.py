"""``benchmarks.training`` on a tiny layer: every system computes the same gradients."""

import pytest
import torch

from benchmarks import report_training, training


@pytest.mark.parametrize("name", training.NAMES)
def test_systems_give_the_gradients_of_one_layer(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function: function)
    torch.manual_seed(0)
    layer = [training.Linears(24, 64, [64, 32, 32], "cpu"), training.Linears(24, 128, [64], "cpu")]
    got, want = getattr(training.Systems(layer), name)(), training.wanted(layer, name)
    assert len(got) == {"bf16": 4, "grouped": 10}.get(name, 12)
    assert [t.shape for t in got] == [t.shape for t in want]
    cosine, ratio = training.agreement(got, want)
    assert cosine > 0.999 and abs(ratio - 1) < 0.02


def test_agreement_is_of_the_worst():
    one = torch.tensor([1.0, 0.0])
    assert training.agreement([one, one], [one, torch.tensor([1.0, 1.0])])[0] == pytest.approx(0.5**0.5)
    assert training.agreement([one, 0.5 * one], [one, one])[1] == pytest.approx(0.5)


def test_the_page_divides_by_bf16_timed_the_same_way():
    ms = {"eager": {"bf16": 2.0, "compiled": 5.0, "w8a16": 3.0}, "graph": {"bf16": 4.0, "w8a16": 5.0}}
    row = {"tokens": 64, "ms": ms, "agrees": {name: [0.99999, 1.0] for name in ms["eager"]}}
    lines = report_training.layer([row]).splitlines()
    assert lines[-1] == "| 64 | W8A16, a linear at a time | 3.00 | 1.50 | 5.00 | 1.250 | 0.99999 |"
    assert "| 5.00 | 2.50 | - | - |" in lines[-2]
