"""The operators' page lists every operator with the schema the code registers."""

import re
from pathlib import Path

import pytest

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


def test_page_lists_no_operator_that_is_gone():
    block = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert set(re.findall(r"^(\w+)\(", block[1], re.MULTILINE)) == set(SCHEMAS) - set(LINEAR_OPS[1:])
