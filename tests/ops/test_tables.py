"""Tables of measured plans come back as they were written, and whatever else a file says, only candidates come out."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torch_epilora.ops import tables
from torch_epilora.ops.candidates import neighbours, refused, routes, with_tiles
from torch_epilora.ops.plan import Problem
from torch_epilora.ops.tables import Key, Measured, key_of, problem_of, read, write

GPU, HOPPER = "NVIDIA H200", (9, 0)
PROBLEMS = [Problem(64, 6144, 4096, 64, 3, 9), Problem(256, 4096, 4096, 16, 1, 33), Problem(2048, 4096, 12288)]


def measured() -> dict[Key, Measured]:
    """The last neighbour of the last path of each problem."""
    found = {}
    for p in PROBLEMS:
        plan = routes(p)[-1]
        for _, others in neighbours(plan, p):
            plan = others[-1] if others and refused(others[-1], p) is None else plan
        found[key_of(p)] = Measured(plan, 12.5, 14.25, p.m < 2048)
    return found


def content(path: Path) -> dict[str, Any]:
    write(path, GPU, HOPPER, measured(), {"torch": "2.11.0"})
    return json.loads(path.read_text())


def test_a_table_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "table.json"
    write(path, GPU, HOPPER, measured(), {"torch": "2.11.0"})
    found = read(path, GPU)
    for key, wrote in measured().items():
        p = problem_of(key, HOPPER)
        assert key_of(p) == key
        got = found.pop(key)
        assert (got.us, got.rules_us, got.graph) == (12.5, 14.25, wrote.graph)
        assert (got.plan.path, got.plan.base) == (wrote.plan.path, wrote.plan.base)
        assert refused(got.plan, p) is None and replace(got.plan, reason="") == replace(wrote.plan, reason="")
    assert not found
    assert [p.name for p in path.parent.iterdir()] == ["table.json"] and json.loads(path.read_text())[
        "torch"
    ] == "2.11.0"


def test_a_key_is_a_bucket() -> None:
    p = Problem(33, 6144, 4096, 64, 3, 6)
    assert key_of(p) == key_of(replace(p, m=64, groups=9)) != key_of(replace(p, m=65))
    assert key_of(replace(p, m=3)).adapters == 4 and key_of(replace(p, groups=200)).adapters == 64
    assert key_of(replace(p, rank=0, slices=1)).adapters == 0


def test_without_the_file_a_table_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read(tmp_path / "no.json", GPU) == {} and not caplog.records


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("[]", "expected an object with a list of plans"),
        ('{"gpu": "NVIDIA H200", "capability": [9, 0]}', "expected an object with a list of plans"),
        ('{"gpu": "NVIDIA H100", "capability": [9, 0], "plans": []}', "expected a table of NVIDIA H200"),
        ('{"gpu": "NVIDIA H200", "plans": []}', "capability"),
        ('{"gpu": "NVIDIA H200", "capability": 90, "plans": []}', "int"),
        ("[" * 100_000, "recursion"),
        ('{"gpu": "NVIDIA H200", "capability": [Infinity, 0], "plans": []}', "infinity"),
    ],
)
def test_what_is_no_table_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, why: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(text)
    assert read(path, GPU) == {}
    assert len(caplog.records) == 1 and str(path) in caplog.text and why in caplog.text


def test_a_huge_file_and_a_folder_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch) -> None:
    path = tmp_path / "table.json"
    content(path)
    assert read(tmp_path, GPU) == {} and len(caplog.records) == 1
    monkeypatch.setattr(tables, "_MOST_BYTES", 10)
    assert read(path, GPU) == {} and "expected at most 10 bytes" in caplog.text


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 65}, {"tokens": 0}, {"tokens": True}, {"tokens": "64"}, {"tokens": 1 << 40}, {"adapters": 3},
        {"adapters": -1}, {"rank": -1}, {"n": 4096.0}, {"k": 0}, {"layout": 1}, {"layout": "row"}, {"compute": "w4a4"},
        {"dtype": "int8"}, {"dtype": "nn"}, {"path": "reference"}, {"path": "eager"}, {"path": ["decode"]},
        {"base": "none"}, {"path": "decode", "base": "own", "tokens": 128}, {"us": "fast"}, {"us": None},
        {"tiles": []}, {"tiles": {"matmul": {}}}, {"tiles": {"decode": {"block_q": 1}}}, {"tiles": {"decode": []}},
        {"tiles": {"shrink": {"split_k": 3}}}, {"tiles": {"shrink": {"split_k": True}}},
        {"tiles": {"shrink": {"split_k": "4"}}}, {"tiles": {"decode": {"block_m": 16}}},
        {"tiles": {"decode": {"num_stages": 64}}}, {"tiles": {"tma": {"num_stages": 4}}},
        {"tiles": {"decode": {"overlap": 1}}}, {"us": 10**400}, {"us": 0}, {"us": float("nan")}, {"rules_us": -1.0},
        {"rules_us": float("inf")}, {"graph": "false"}, {"graph": 1},
    ],
)  # fmt: skip
def test_an_entry_that_is_no_candidate_is_left_out_and_the_others_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict
) -> None:
    path = tmp_path / "table.json"
    table = content(path)
    at = next(i for i, entry in enumerate(table["plans"]) if entry["tokens"] == 64)
    assert (table["plans"][at]["path"], table["plans"][at]["base"]) == ("hybrid", "decode")
    table["plans"][at] |= change
    path.write_text(json.dumps(table))
    assert set(read(path, GPU)) == {key_of(p) for p in PROBLEMS[1:]}
    assert "1 of 3 plans are left out" in caplog.text


@pytest.mark.parametrize("name", ["tokens", "dtype", "path", "base", "tiles", "us", "rules_us", "graph"])
def test_an_entry_without_a_value_is_left_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / "table.json"
    table = content(path)
    del table["plans"][0][name]
    path.write_text(json.dumps(table))
    assert len(read(path, GPU)) == 2


def test_a_table_of_another_version_cannot_name_tiles_of_now(tmp_path: Path) -> None:
    """Entries name all their tiles, so a rule that changed since changes none of them."""
    key = key_of(PROBLEMS[0])
    plan = with_tiles(measured()[key].plan, "shrink", {"num_stages": 2})
    write(tmp_path / "t.json", GPU, HOPPER, {key: Measured(plan, 1.0, 2.0, True)}, {})
    entry = json.loads((tmp_path / "t.json").read_text())["plans"][0]
    assert set(entry["tiles"]) == {"decode", "shrink", "expand"} and len(entry["tiles"]["decode"]) == 16


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["decode", "own", "tma", "", "float16"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
NAMES = [*Key.__annotations__, "path", "base", "tiles", "us", "rules_us", "graph"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.dictionaries(st.sampled_from(NAMES), JSON, min_size=1, max_size=2), tiles=st.booleans())
def test_nothing_in_a_file_makes_more_than_a_candidate(tmp_path: Path, change: dict, tiles: bool) -> None:
    path = tmp_path / "table.json"
    table = content(path)
    if tiles:
        kernel = next(iter(table["plans"][0]["tiles"].values()))
        kernel |= dict(zip(kernel, change.values(), strict=False))
    else:
        table["plans"][0] |= change
    path.write_text(json.dumps(table))
    for key, found in read(path, GPU).items():
        assert refused(found.plan, problem_of(key, HOPPER)) is None
