"""What a name of a Python source can be expected to be, told from the syntax tree; nothing is imported or run."""

import ast
import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

_BINDINGS = ("property", "cached_property", "classmethod", "staticmethod")


class Source:
    """A module's syntax tree, and what its names are bound by.

    Parameters
    ----------
    tree : ast.Module
        The parsed module.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self._names = _names(tree.body)

    def find(self, name: str) -> ast.AST | None:
        """Find what binds a name, or a class's member with a dot; inherited ones as far as this file shows them."""
        owner, _, member = name.rpartition(".")
        if not owner:
            return self._names.get(member)
        return next(
            (members[member] for ancestor in self.lineage(owner) if member in (members := self.members(ancestor))), None
        )

    def lineage(self, name: str) -> list[str]:
        """List a class and what it derives from, nearest first; a class of another file ends its branch."""
        found: list[str] = []
        todo = [name]
        while todo:
            name = todo.pop(0)
            if name in found:  # a class may have the name of an imported one that it derives from
                continue
            found.append(name)
            node = self._names.get(name)
            if isinstance(node, ast.ClassDef):
                todo = [_leaf(base) for base in node.bases] + todo
        return found

    def members(self, name: str) -> dict[str, ast.AST]:
        """Give what a class's own body binds; nothing for what is no class of this file."""
        node = self._names.get(name)
        return _names(node.body) if isinstance(node, ast.ClassDef) else {}


class Expectation(Protocol):
    """What a name should be; its text goes on after "expected"."""

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None if it is as expected."""


@dataclass(frozen=True)
class Assigned:
    """A value that the module assigns."""

    def __str__(self) -> str:
        """Go on after "expected"."""
        return "a value assigned in the module"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        return None if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None else _what(node)


@dataclass(frozen=True)
class Class:
    """A class, with one that it derives from and a decorator where these matter."""

    base: str = ""
    decorator: str = ""

    def __str__(self) -> str:
        """Go on after "expected"."""
        kind = f"a @{self.decorator} class" if self.decorator else "a class"
        return f"{kind} that derives from {self.base}" if self.base else kind

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        if not isinstance(node, ast.ClassDef):
            return _what(node)
        bases = source.lineage(name)[1:]
        if self.base and self.base not in bases:
            return f"one that derives from {', '.join(bases) or 'nothing'}"
        decorators = [_leaf(decorator) for decorator in node.decorator_list]
        if self.decorator and self.decorator not in decorators:
            return f"one decorated with {', '.join(decorators) or 'nothing'}"
        return None


@dataclass(frozen=True)
class Field:
    """A field of a class that is a dataclass, or made one by vLLM's own decorator."""

    def __str__(self) -> str:
        """Go on after "expected"."""
        return "an annotated field"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        return None if isinstance(node, ast.AnnAssign) else _what(node)


@dataclass(frozen=True)
class Set:
    """An attribute that a method assigns, on its own object or on an argument."""

    by: str
    on: str = "self"

    def __str__(self) -> str:
        """Go on after "expected"."""
        return f"an attribute of {self.on} set by {self.by}"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        owner, _, attribute = name.rpartition(".")
        target = f"{self.on}.{attribute}"
        if _sets(source.find(f"{owner}.{self.by}"), target):
            return None
        setters = [method for method, node in source.members(owner).items() if _sets(node, target)]
        return f"one set by {', '.join(setters)}" if setters else "none that is set"


@dataclass(frozen=True)
class Takes:
    """A function with just these parameters, for what the plugin overrides or wraps."""

    signature: str

    def __str__(self) -> str:
        """Go on after "expected"."""
        return self.signature

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        if not isinstance(node, ast.FunctionDef):
            return _what(node)
        found = _signature(node)
        return None if found == self.signature else found


@dataclass(frozen=True)
class Accepts:
    """A function that can be called with these keywords alone, for what the plugin calls."""

    keywords: tuple[str, ...]
    binding: str

    def __str__(self) -> str:
        """Go on after "expected"."""
        return f"{self.binding} that can be called with {_arguments(0, self.keywords)}"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        if not isinstance(node, ast.FunctionDef):
            return _what(node)
        named, required = _parameters(node.args)
        fits = set(self.keywords) <= named and required <= {*self.keywords, "self", "cls"}
        return None if fits and _binding(node) == self.binding else _signature(node)


@dataclass(frozen=True)
class Calls:
    """A function that calls another, each time with so many positional arguments and these keywords."""

    callee: str
    positional: int = 0
    keywords: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Go on after "expected"."""
        return f"a function that calls {self.callee}{_arguments(self.positional, self.keywords)}"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        if not isinstance(node, ast.FunctionDef):
            return _what(node)
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call) and self._is_callee(call.func)]
        wrong = [call for call in calls if not self._fits(call)]
        if wrong:
            return ast.unparse(wrong[0])
        return None if calls else "no such call"

    def _is_callee(self, function: ast.expr) -> bool:
        return f".{ast.unparse(function)}".endswith(f".{self.callee}")

    def _fits(self, call: ast.Call) -> bool:
        return len(call.args) == self.positional and {keyword.arg for keyword in call.keywords} == set(self.keywords)


@dataclass(frozen=True)
class Reads:
    """A function that looks at a value each time it is called."""

    what: str

    def __str__(self) -> str:
        """Go on after "expected"."""
        return f"a function that reads {self.what}"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        node = source.find(name)
        if not isinstance(node, ast.FunctionDef):
            return _what(node)
        return None if _has(node, self.what, ast.Load) else "one that does not"


@dataclass(frozen=True)
class Text:
    """A string that stands in the module, whatever name it has there."""

    def __str__(self) -> str:
        """Go on after "expected"."""
        return "a string in the module"

    def differs(self, source: Source, name: str) -> str | None:
        """Say what is there instead, or None."""
        found = any(isinstance(node, ast.Constant) and node.value == name for node in ast.walk(source.tree))
        return None if found else "none"


def _names(body: Iterable[ast.AST]) -> dict[str, ast.AST]:
    """Say what binds each name of a body, at last; every branch counts as taken."""
    found: dict[str, ast.AST] = {}
    for statement in body:
        match statement:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found[statement.name] = statement
            case ast.Assign():
                found |= {target.id: statement for target in statement.targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = statement
            case ast.stmt() | ast.ExceptHandler():
                found |= _names(ast.iter_child_nodes(statement))
    return found


def _what(node: ast.AST | None) -> str:
    match node:
        case None:
            return "nothing of that name"
        case ast.ClassDef():
            return "a class"
        case ast.FunctionDef():
            return "a function"
        case ast.AsyncFunctionDef():
            return "an async function"
        case ast.AnnAssign(value=None):
            return "an annotation without a value"
        case _:
            return "an assignment"


def _leaf(expression: ast.expr) -> str:
    """Give the last name of a base class or a decorator, without what it is indexed or called with."""
    match expression:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return _leaf(inner)
        case _:
            return ast.unparse(expression)


def _sets(node: ast.AST | None, target: str) -> bool:
    return isinstance(node, ast.FunctionDef) and _has(node, target, ast.Store)


def _has(function: ast.FunctionDef, what: str, context: type[ast.expr_context]) -> bool:
    """Say whether a function loads or stores a name or an attribute; an annotation alone does neither."""
    parts = list(ast.walk(function))
    bare = [part.target for part in parts if isinstance(part, ast.AnnAssign) and part.value is None]
    return any(
        isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, context) and ast.unparse(part) == what
        for part in parts
        if part not in bare
    )


def _signature(function: ast.FunctionDef) -> str:
    """Write how a function is bound and its parameters, without annotations."""
    bare = copy.deepcopy(function.args)
    for part in ast.walk(bare):
        if isinstance(part, ast.arg):
            part.annotation = None
    return f"{_binding(function)} ({ast.unparse(bare)})".lstrip()


def _binding(function: ast.FunctionDef) -> str:
    """Write those of a function's decorators that change how it is called."""
    leaves = [_leaf(decorator) for decorator in function.decorator_list]
    return " ".join(f"@{leaf}" for leaf in leaves if leaf in _BINDINGS)


def _parameters(args: ast.arguments) -> tuple[set[str], set[str]]:
    """List the parameters that can be given by name, and those that have to be given."""
    positional = [arg.arg for arg in args.posonlyargs + args.args]
    required = set(positional[: len(positional) - len(args.defaults)])
    required |= {arg.arg for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True) if default is None}
    return {arg.arg for arg in args.args + args.kwonlyargs}, required


def _arguments(positional: int, keywords: Sequence[str]) -> str:
    return f"({', '.join(['_'] * positional + [f'{keyword}=' for keyword in keywords])})"
