"""Patterns for module names: PEFT's answer, in bounded time, whatever an adapter's config says."""

import time

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from torch_epilora.formats import read_adapter
from torch_epilora.formats.name_patterns import NamePatterns

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 8}


def state(modules):
    a, b = torch.zeros(8, 4), torch.zeros(4, 8)
    return {f"{m}.{part}.weight": t for m in modules for part, t in (("lora_A", a), ("lora_B", b))}


ATOMS = st.sampled_from(
    ["a", "b", "1", "_", "-", ".", r"\.", r"\-", r"\d", r"\w", r"\D", r"\W", r"\s", "[ab]", "[^a]", "[]a]", "[^]]",
     "[a-]", r"[\d.]", r"[\]b]", "[0-9]", "é", "^", "$"]
)  # fmt: skip
REPEATS = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??", "{2}", "{1,2}", "{1,}", "{0,3}?"])
REGEX = st.recursive(
    st.builds(lambda atom, repeat: atom + (repeat if atom not in "^$" else ""), ATOMS, REPEATS),
    lambda inner: st.builds(
        lambda branches, opening, optional: f"{opening}{'|'.join(branches)}){optional}",
        st.lists(st.lists(inner, max_size=3).map("".join), min_size=1, max_size=3),
        st.sampled_from(["(", "(?:"]),
        st.sampled_from(["", "?", "??"]),
    ),
    max_leaves=6,
)
NAMES = st.lists(st.sampled_from([*"ab..", r"\.", r"\-"]), max_size=5).map("".join)
PATTERNS = st.lists(REGEX, max_size=4).map("".join)


@settings(max_examples=500, deadline=None)
@given(patterns=st.lists(PATTERNS, max_size=4), module=st.text("ab1._-]é", max_size=9))
def test_regular_expressions_match_as_peft_matches_them(patterns, module):
    other = pytest.importorskip("peft.utils.other")
    values = {pattern: i for i, pattern in enumerate(patterns)}
    expected = values.get(other.get_pattern_key(values.keys(), module), -1)
    assert NamePatterns(values).find(module, -1) == expected


@settings(max_examples=1500, deadline=None)
@given(patterns=st.lists(NAMES, max_size=8), module=st.text("ab.-", max_size=8))
def test_names_match_as_peft_matches_them(patterns, module):
    """A dot in a name is any character, the first pattern wins, and an empty one follows a dot at the end."""
    other = pytest.importorskip("peft.utils.other")
    values = {pattern: i for i, pattern in enumerate(patterns)}
    expected = values.get(other.get_pattern_key(values.keys(), module), -1)
    assert NamePatterns(values).find(module, -1) == expected


@pytest.mark.parametrize(
    "patterns, module, expected",
    [
        ({"q_proj": 1}, "model.layers.0.q_proj", 1),
        ({"q_proj": 1}, "model.layers.0.xq_proj", 0),
        ({"0.q": 1}, "layers.0xq", 1),
        ({"s.0.q": 1, "layers.0.q": 2}, "layers.0.q", 2),
        ({"layers.0.q": 1}, "layers_0_q", 1),
        ({r"layers\.0\.q": 1}, "layers_0_q", 0),
        ({"layers.0.q": 1, "layers_0_q": 2}, "layers_0_q", 1),
        ({r"up\-proj": 1, "up-proj": 2}, "mlp.up-proj", 1),
        ({"^model.decoder.layers.0.k": 1}, "model.decoder.layers.0.k", 1),
        ({"^layers.0.k": 1}, "model.layers.0.k", 0),
        ({r".*layers\.(?:[0-9]|1[0-5])\..*": 1}, "model.layers.12.mlp.up_proj", 1),
        ({r".*layers\.(?:[0-9]|1[0-5])\..*": 1}, "model.layers.16.mlp.up_proj", 0),
        ({r"layers\.\d+\.(self_attn\.)?[qk]_proj": 1}, "model.layers.160.q_proj", 1),
    ],
)
def test_known_answers(patterns, module, expected):
    assert NamePatterns(patterns).find(module, 0) == expected


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
@pytest.mark.parametrize(
    "pattern, error, message",
    [
        ("(a+)+", NotImplementedError, r"'\(a\+\)\+' is not supported at '\+'; expected names"),
        ("(a|a)*", NotImplementedError, "is not supported at"),
        ("(a?){9}", NotImplementedError, "is not supported at"),
        ("(?=a)a", NotImplementedError, "is not supported at"),
        (r"(a)\1", NotImplementedError, "is not supported at"),
        ("(?i)a", NotImplementedError, "is not supported at"),
        (r"\bq", NotImplementedError, "is not supported at"),
        ("a{10}", NotImplementedError, "is not supported at"),
        ("a*+", NotImplementedError, "is not supported at"),
        ("(" * 9 + "a" + ")" * 9, NotImplementedError, "up to 8 deep"),
        ("a)|(b", ValueError, "expected a regular expression, got"),
        ("(" * 5000 + "a" + ")" * 5000, ValueError, "expected patterns of at most 512 characters, got 10001"),
        ("(" * 255 + "a" + ")" * 255, (ValueError, NotImplementedError), "(expected a regular|up to 8 deep)"),
        ("a{99999999999999999999}", ValueError, "expected a regular expression, got .*repetition number is too large"),
    ],
)
def test_what_could_run_for_ever_is_refused_by_name(name, pattern, error, message):
    source = state(["a" * 40 + "!"]), {**CONFIG, name: {pattern: 4}}
    with pytest.raises(error, match=f"config: {name}: .*{message}"):
        read_adapter(source)


@pytest.mark.parametrize(
    "patterns, message",
    [
        ({f"q{i}": 4 for i in range(70_000)}, "at most 65536 patterns, got 70000"),
        ({f"{i}{'[a]' * 100}": 4 for i in range(200)}, "of 32768 characters in all"),
        ({f"[{chr(0x4E00 + i)}]": 4 for i in range(300)}, "at most 256 different character classes"),
        ({"a" * i + "." + "a" * j: 4 for i in range(30) for j in range(30)}, "at most 512 different places, got 900"),
    ],
)
def test_too_many_patterns(patterns, message):
    with pytest.raises(ValueError, match=f"config: rank_pattern: expected .*{message}"):
        read_adapter((state(["q"]), {**CONFIG, "rank_pattern": patterns}))


def seconds(patterns, modules):
    start = time.perf_counter()
    found = [NamePatterns(patterns).find(modules[0], 0)]
    table = NamePatterns(patterns)
    found += [table.find(module, 0) for module in modules]
    return time.perf_counter() - start, found[1:]


def test_a_pattern_a_module_is_quick():
    """As EVA writes them; a compiled expression each took a minute."""
    modules = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(20) for j in range(100)]
    patterns = {module: i for i, module in enumerate(modules)}
    took, found = seconds(patterns, modules)
    assert found == list(range(2000)) and took < 5


def test_the_worst_that_is_accepted_is_quick():
    """Runs that a backtracking matcher tries in all combinations."""
    modules = ["a" * 500 + f"{i}!" for i in range(20)]
    patterns = {"a*" * 240 + f"{'.*a' * 8}{i}": i for i in range(60)}
    took, found = seconds(patterns, modules)
    assert found == [0] * 20 and took < 5


def test_ranks_of_many_modules():
    modules = [f"model.layers.{i}.q_proj" for i in range(100)]
    source = state(modules), {**CONFIG, "rank_pattern": {f"layers.{i}.k_proj": 4 for i in range(2000)}}
    start = time.perf_counter()
    assert read_adapter(source).modules.keys() == set(modules)
    assert time.perf_counter() - start < 5
