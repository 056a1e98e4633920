"""The reference pages show the public names, and each entry says of every parameter what it is."""

import importlib
import inspect
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
    public["adapter_slots"] = torch_epilora.nn.adapter_slots
    assert {id(thing) for thing in shown} == {id(thing) for thing in public.values()}, sorted(public)


FUNCTIONS = {
    f"{module.__name__}.{name}": getattr(module, name)
    for module in (torch_epilora, torch_epilora.ops, torch_epilora.formats)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name))
} | {"torch_epilora.nn.adapter_slots": torch_epilora.nn.adapter_slots}


def _documented(thing, section: str) -> list[str]:
    """Return the names under a heading of a numpydoc docstring, as they stand before the colon."""
    found = re.search(rf"^{section}\n-+\n(.*?)(?=^\w+\n-+$|\Z)", inspect.getdoc(thing) or "", re.MULTILINE | re.DOTALL)
    return re.findall(r"^(\S.*?)(?: : .*)?$", found[1], re.MULTILINE) if found else []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_has_an_entry_of_its_own(name):
    assert _documented(FUNCTIONS[name], "Parameters") == list(inspect.signature(FUNCTIONS[name]).parameters)


@pytest.mark.parametrize("entry", sorted(entry for entries in ENTRIES.values() for entry in entries))
def test_every_field_has_an_entry_of_its_own(entry):
    module, _, name = entry.rpartition(".")
    thing = getattr(importlib.import_module(module), name)
    fields = getattr(thing, "_fields", None) or getattr(thing, "__dataclass_fields__", None)
    if fields is not None:
        assert _documented(thing, "Attributes") == list(fields)


@pytest.mark.parametrize("entry", sorted(entry for entries in ENTRIES.values() for entry in entries))
def test_entry_has_no_markup_that_the_pages_do_not_render(package, entry):
    found = package[entry.removeprefix("torch_epilora.")]
    for shown in (found, *found.members.values()):
        if shown.docstring is not None and not shown.is_alias:
            text = re.sub(r"``.*?``", "", shown.docstring.value, flags=re.DOTALL)
            assert not re.search(r":(?:func|class|meth|mod|attr):`|\*\S+\*|\*\.", text), shown.path
