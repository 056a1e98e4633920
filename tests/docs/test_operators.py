"""The operators' page lists every operator with the schema the code registers."""

import re
from pathlib import Path

import pytest
import torch

from torch_epilora.ops import dequantize_fp8
from torch_epilora.ops.schemas import LINEAR_OPS, SCHEMAS

PAGE = (Path(__file__).parents[2] / "docs" / "operators.md").read_text(encoding="utf-8")


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("name", SCHEMAS)
def test_page_has_schema(name):
    if name in LINEAR_OPS[1:]:
        assert SCHEMAS[name] == SCHEMAS[LINEAR_OPS[0]], "the page says that the paths take the same arguments"
        assert f"`{name}`" in PAGE
    else:
        assert _plain(name + SCHEMAS[name]) in _plain(PAGE)


def test_example_runs_and_adds_each_entrys_adapter():
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(example.splitlines()) <= 12
    found: dict = {}
    exec(compile(example, "operators.md", "exec"), found)
    x, y, a, b = (found[name] for name in ("x", "y", "a", "b"))
    assert y.shape == (6, 384) and y.dtype == torch.bfloat16
    codes, scale = torch.ops.epilora.quantize_fp8_token(x)
    expected = codes.float() * scale @ dequantize_fp8(found["weight"], found["scale"]).t()
    for rows, slot in ((slice(0, 2), 1), (slice(4, 6), 0)):
        expected[rows] += found["scaling"][slot] * (x[rows].float() @ a[0][slot].float().t() @ b[0][slot].float().t())
    torch.testing.assert_close(y.float(), expected, rtol=0.02, atol=0.05)


def test_page_gives_every_quantizers_scale():
    x = torch.randn(5, 300)
    forms = {(5, 1): "[M, 1]", (5, 3): "[M, ceil(K/128)]", (1,): "[1]"}
    for name in ("quantize_fp8_token", "quantize_fp8_group", "quantize_fp8_tensor"):
        codes, scale = getattr(torch.ops.epilora, name)(x)
        assert f"| `{name}` | [M, K] | {forms[tuple(scale.shape)]}" in PAGE and codes.shape == x.shape
    assert all(f"`{name}`" in PAGE for name in SCHEMAS)


def test_page_lists_no_operator_that_is_gone():
    block = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert set(re.findall(r"^(\w+)\(", block[1], re.MULTILINE)) == set(SCHEMAS) - set(LINEAR_OPS[1:])
