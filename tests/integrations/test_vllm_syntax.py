"""What a name can be expected to be: sources in which it is, and in which it is not."""

import ast

import pytest

from torch_epilora.integrations.vllm.syntax import (
    Accepts,
    Assigned,
    Calls,
    Class,
    Expectation,
    Field,
    Reads,
    Set,
    Source,
    Takes,
    Text,
)


def differs(text: str, name: str, expected: Expectation) -> str | None:
    return expected.differs(Source(ast.parse(text)), name)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("if here:\n  x = 1\nelse:\n  x: int = 2", "x", Assigned()),
        ("try:\n  from a import x\nexcept ImportError:\n  x = None", "x", Assigned()),
        ("with a:\n  x = y = 1", "y", Assigned()),
        ("class A(b.B, C[int], metaclass=M): ...", "A", Class("B")),
        ("class A(b.B, C[int], metaclass=M): ...", "A", Class("C")),
        ("class C(Base): ...\nclass B(C): ...\nclass A(X, B): ...", "A", Class("Base")),
        ("class A(A): ...", "A", Class()),
        ("class A(make()): ...", "A", Class("make")),
        ("@dataclasses.dataclass(frozen=True)\nclass A: ...", "A", Class(decorator="dataclass")),
        ("class A:\n  x: int", "A.x", Field()),
        ("class B:\n  x: int\nclass A(B): ...", "A.x", Field()),
        ("class A:\n  def f(self):\n    with a:\n      (self.x, y), *self.z = a", "A.x", Set("f")),
        ("class A:\n  def f(self):\n    for self.x in a: ...", "A.x", Set("f")),
        ("class B:\n  def f(self):\n    self.x = 1\nclass A(B): ...", "A.x", Set("f")),
        ("class A:\n  def f(self, layer):\n    layer.x = 1", "A.x", Set("f", "layer")),
        ("def f(a: int, /, b: str = 'x', *c: int, d, **e: int) -> int: ...", "f", Takes("(a, /, b='x', *c, d, **e)")),
        ("class A:\n  @overload\n  def f(self): ...\n  def f(self, x): ...", "A.f", Takes("(self, x)")),
        (
            "class A:\n  @other\n  @functools.cached_property\n  def f(self): ...",
            "A.f",
            Takes("@cached_property (self)"),
        ),
        ("class A:\n  @staticmethod\n  def f(a, *, b, c=1, **k): ...", "A.f", Accepts(("a", "b"), "@staticmethod")),
        ("def f(a, b=1): ...", "f", Accepts(("a", "b"), "")),
        ("def f():\n  def g():\n    a.b.h(1, k=2)", "f", Calls("h", 1, ("k",))),
        ("def f():\n  h(1)\n  x.oh(1, 2)", "f", Calls("h", 1)),
        ("def f(self):\n  self.h(1)\n  other.h(1, 2)", "f", Calls("self.h", 1)),
        ("def f():\n  return a.b.c", "f", Reads("a.b")),
        ("X = ['text']", "text", Text()),
    ],
)
def test_as_expected(text: str, name: str, expected: Expectation) -> None:
    assert differs(text, name, expected) is None


@pytest.mark.parametrize(
    ("text", "name", "expected", "found"),
    [
        ("def f():\n  x = 1", "x", Assigned(), "nothing of that name"),
        ("import x", "x", Assigned(), "nothing of that name"),
        ("x = 1\ndef x(): ...", "x", Assigned(), "a function"),
        ("x[0] = y.x = 1", "x", Assigned(), "nothing of that name"),
        ("class B(C): ...\nclass A(B, D.E): ...", "A", Class("Base"), "one that derives from B, C, E"),
        ("class A: ...", "A", Class("Base"), "one that derives from nothing"),
        ("class A(A): ...", "A", Class("Base"), "one that derives from nothing"),
        ("class A(B if c else D): ...", "A", Class("B"), "one that derives from B if c else D"),
        ("@config(x)\n@final\nclass A: ...", "A", Class("", "dataclass"), "one decorated with config, final"),
        ("class A:\n  x = 1", "A.x", Field(), "an assignment"),
        ("class A:\n  def f(self):\n    self.x: int = 1", "A.x", Field(), "nothing of that name"),
        ("x: int", "A.x", Field(), "nothing of that name"),
        ("A = 1", "A.x", Field(), "nothing of that name"),
        (
            "class A:\n  def g(self):\n    self.x = 1\n  def h(self):\n    self.x = 2",
            "A.x",
            Set("f"),
            "one set by g, h",
        ),
        ("class A:\n  def f(self):\n    self.x[0] = 1", "A.x", Set("f"), "none that is set"),
        ("class A:\n  def f(self):\n    self.x: int\n    del self.x", "A.x", Set("f"), "none that is set"),
        ("class A:\n  def f(self):\n    other.x = self.y = 1", "A.x", Set("f"), "none that is set"),
        ("class A:\n  async def f(self):\n    self.x = 1", "A.x", Set("f"), "none that is set"),
        ("class A:\n  f = 1", "A.x", Set("f"), "none that is set"),
        ("x = 1", "A.x", Set("f"), "none that is set"),
        ("def f(a, b=None): ...", "f", Takes("(a, b)"), "(a, b=None)"),
        ("@staticmethod\ndef f(a): ...", "f", Takes("(a)"), "@staticmethod (a)"),
        ("def f(a, /): ...", "f", Accepts(("a",), ""), "(a, /)"),
        ("def f(a, /, b): ...", "f", Accepts(("b",), ""), "(a, /, b)"),
        ("def f(a, b): ...", "f", Accepts(("a",), ""), "(a, b)"),
        ("def f(a, *, b): ...", "f", Accepts(("a",), ""), "(a, *, b)"),
        ("def f(**a): ...", "f", Accepts(("a",), ""), "(**a)"),
        ("def f():\n  h(1)\n  h(2, 3)", "f", Calls("h", 1), "h(2, 3)"),
        ("def f():\n  h(1, **k)", "f", Calls("h", 1), "h(1, **k)"),
        ("def f():\n  x.oh(1)", "f", Calls("h", 1), "no such call"),
        ("def f():\n  other.h(1)", "f", Calls("self.h", 1), "no such call"),
        ("def f():\n  a = 1", "f", Reads("a"), "one that does not"),
        ("def f():\n  a.b = 1", "f", Reads("a.b"), "one that does not"),
        ("X = 'some text'", "text", Text(), "none"),
    ],
)
def test_otherwise(text: str, name: str, expected: Expectation, found: str) -> None:
    assert differs(text, name, expected) == found


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        (Class(), "a class"),
        (Class("B"), "a class that derives from B"),
        (Class("B", "d"), "a @d class that derives from B"),
        (Set("f", "layer"), "an attribute of layer set by f"),
        (Accepts(("a", "b"), "@classmethod"), "@classmethod that can be called with (a=, b=)"),
        (Calls("f", 2, ("a",)), "a function that calls f(_, _, a=)"),
        (Reads("a.b"), "a function that reads a.b"),
        (Assigned(), "a value assigned in the module"),
        (Text(), "a string in the module"),
    ],
)
def test_wording(expected: Expectation, text: str) -> None:
    assert str(expected) == text
