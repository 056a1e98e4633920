"""The reference pages show the public names; each entry is the object users import, not a module of its name."""

import importlib
import re
from pathlib import Path

import pytest

import torch_epilora

griffe = pytest.importorskip("griffe")
ROOT = Path(__file__).parents[2]
ENTRIES = {
    page.name: re.findall(r"^::: (\S+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    for page in (ROOT / "docs").glob("*.md")
}


@pytest.fixture(scope="module")
def package():
    return griffe.load("torch_epilora", search_paths=[ROOT], resolve_aliases=True)


@pytest.mark.parametrize("entry", sorted(entry for entries in ENTRIES.values() for entry in entries))
def test_entry_is_documented_and_no_module(package, entry):
    found = package[entry.removeprefix("torch_epilora.")]
    assert found.kind.value in ("function", "class"), f"{entry} is a {found.kind.value}"
    assert found.docstring is not None


def test_api_page_has_every_public_name():
    shown = []
    for entry in ENTRIES["api.md"]:
        module, _, name = entry.rpartition(".")
        shown.append(getattr(importlib.import_module(module), name))
    public = {name: getattr(torch_epilora, name) for name in torch_epilora.__all__ if not name.startswith("_")}
    assert {id(thing) for thing in shown} == {id(thing) for thing in public.values()}, sorted(public)
