"""Measured plans are followed where they can run, the user's before the shipped ones, and the rules everywhere else."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from torch_epilora.ops import choice, tables
from torch_epilora.ops.candidates import refused, routes, with_tiles
from torch_epilora.ops.choice import choose, keep
from torch_epilora.ops.plan import Plan, Problem, make_plan, through
from torch_epilora.ops.tables import Measured, key_of, problem_of

GPU, HOPPER = "NVIDIA H200", (9, 0)
P = Problem(40, 6144, 4096, 64, 3, 9)
KEY = key_of(P)
SLOW = through(P, "hybrid", "vendor")
OTHER = through(P, "hybrid", "decode")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("EPILORA_TUNE", raising=False)
    monkeypatch.setattr(choice, "shipped", lambda gpu: tmp_path / "shipped.json")
    for cache in (choice._table, choice._choose, choice._digest):
        cache.cache_clear()
    yield
    for cache in (choice._table, choice._choose, choice._digest):
        cache.cache_clear()


def ship(plan: Plan) -> None:
    tables.write(choice.shipped(GPU), GPU, HOPPER, {KEY: Measured(plan, 1.0, 2.0, True)}, {})


def bare_of_reason(plan: Plan) -> Plan:
    return replace(plan, reason="")


def test_without_tables_the_rules_choose() -> None:
    assert choose(P, GPU) == make_plan(P)


def test_a_kept_plan_is_followed_at_once_by_its_bucket_alone() -> None:
    assert choose(P, GPU) == make_plan(P)
    path = keep(GPU, HOPPER, {KEY: Measured(SLOW, 10.0, 12.0, True)})
    assert path.is_file() and path.parent.name == "cache"
    assert bare_of_reason(choose(P, GPU)) == bare_of_reason(SLOW)
    assert choose(P, GPU).reason == "the fastest when measured on NVIDIA H200, in CUDA graphs"
    assert bare_of_reason(choose(replace(P, m=64), GPU)) == bare_of_reason(SLOW)
    for others in ({"m": 65}, {"m": 32}, {"n": 6400}, {"rank": 32}, {"slices": 1}, {"groups": 17}, {"layout": "block"}):
        assert choose(replace(P, **others), GPU) == make_plan(replace(P, **others)), others
    assert choose(P, "NVIDIA H100") == make_plan(P)


def test_codes_and_one_scale_are_served_by_what_was_measured_without_until_they_are_measured() -> None:
    tensor, coded = replace(P, layout="tensor"), replace(P, layout="tensor", codes=True)
    keep(GPU, HOPPER, {KEY: Measured(SLOW, 10.0, 12.0, True)})
    for problem in (tensor, coded, replace(P, codes=True)):
        assert bare_of_reason(choose(problem, GPU)) == bare_of_reason(SLOW)
    other = through(tensor, "hybrid", "decode")
    keep(GPU, HOPPER, {key_of(tensor): Measured(other, 10.0, 12.0, True)})
    assert choose(tensor, GPU).base == choose(coded, GPU).base == "decode" != choose(P, GPU).base
    keep(GPU, HOPPER, {key_of(coded): Measured(through(coded, "hybrid", "vendor"), 10.0, 12.0, True)})
    assert choose(coded, GPU).base == "vendor" and choose(tensor, GPU).base == "decode"
    assert choose(replace(P, layout="block", codes=True), GPU) == make_plan(replace(P, layout="block", codes=True))


def test_what_was_kept_before_stays() -> None:
    more = key_of(replace(P, m=256))
    keep(GPU, HOPPER, {KEY: Measured(SLOW, 10.0, 12.0, True)})
    keep(GPU, HOPPER, {more: Measured(routes(problem_of(more, HOPPER))[-1], 10.0, 12.0, False)})
    assert set(choice.table(GPU)) == {KEY, more}
    assert choose(replace(P, m=256), GPU).reason.endswith("launched one by one")


def test_the_users_table_comes_before_the_shipped_one() -> None:
    ship(SLOW)
    assert bare_of_reason(choose(P, GPU)) == bare_of_reason(SLOW)
    keep(GPU, HOPPER, {KEY: Measured(OTHER, 1.0, 2.0, True)})
    assert bare_of_reason(choose(P, GPU)) == bare_of_reason(OTHER)


@pytest.mark.parametrize(("mode", "follows"), [("off", False), ("cached", True), ("full", True), ("", True)])
def test_the_environment_says_whether_tables_count(monkeypatch: pytest.MonkeyPatch, mode: str, follows: bool) -> None:
    ship(SLOW)
    monkeypatch.setenv("EPILORA_TUNE", mode)
    assert (bare_of_reason(choose(P, GPU)) == bare_of_reason(SLOW)) is follows


def test_another_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPILORA_TUNE", "always")
    with pytest.raises(ValueError, match="EPILORA_TUNE: expected one of off, cached, full, got 'always'"):
        choose(P, GPU)


def test_a_plan_that_cannot_run_a_problem_of_its_bucket_gives_way() -> None:
    """The largest of a bucket may run with fewer groups than another one's metadata lists."""
    few, many = replace(P, m=64, groups=65), replace(P, m=64, groups=129)
    decode = through(few, "decode", "own")
    assert key_of(few) == key_of(many) and refused(decode, many) is not None
    keep(GPU, HOPPER, {key_of(few): Measured(decode, 1.0, 2.0, True)})
    assert choose(few, GPU).path == "decode" and choose(many, GPU) == make_plan(many)


def test_kernels_that_a_plan_does_not_use_keep_the_rules_tiles() -> None:
    odd = with_tiles(SLOW, "decode", {"num_stages": 3})
    keep(GPU, HOPPER, {KEY: Measured(odd, 1.0, 2.0, True)})
    assert choose(P, GPU).decode == SLOW.decode


def test_the_users_table_is_of_these_versions_and_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = choice.cached(GPU)
    assert choice.cached("NVIDIA H100") != before
    choice._digest.cache_clear()
    assert choice.cached(GPU) == before
    monkeypatch.setattr(choice, "versions", lambda: {"torch": "3.0"})
    choice._digest.cache_clear()
    assert choice.cached(GPU) != before
    monkeypatch.undo()
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "decode.py").write_text("")
    monkeypatch.setattr(choice, "_OPS", tmp_path)
    names = []
    for text in ("one", "two"):
        (tmp_path / "triton" / "decode.py").write_text(text)
        choice._digest.cache_clear()
        names.append(choice.cached(GPU).name)
    assert len({*names, before.name}) == 3


def test_a_cache_that_cannot_be_written_changes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="EPILORA_CACHE: expected a folder to write measured plans to, got"):
        keep(GPU, HOPPER, {KEY: Measured(SLOW, 1.0, 2.0, True)})
    assert choose(P, GPU) == make_plan(P)


def test_by_default_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EPILORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert choice.cached(GPU).parent == tmp_path / "torch_epilora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert choice.cached(GPU).parent == tmp_path / "home" / ".cache" / "torch_epilora"


def test_a_user_without_a_home_has_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("EPILORA_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(choice.Path, "home", homeless)
    assert choose(P, GPU) == make_plan(P)
    with pytest.raises(OSError, match="EPILORA_CACHE: expected a folder for measured plans, got none"):
        keep(GPU, HOPPER, {KEY: Measured(SLOW, 1.0, 2.0, True)})


def test_a_tilde_is_the_users_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("EPILORA_CACHE", "~/plans")
    assert choice.cached(GPU).parent == tmp_path / "plans"


def test_threads_that_keep_plans_lose_none() -> None:
    keys = [key_of(replace(P, n=16 * (i + 1))) for i in range(40)]

    def work(part: int) -> None:
        for key in keys[part::4]:
            keep(GPU, HOPPER, {key: Measured(routes(problem_of(key, HOPPER))[0], 1.0, 2.0, True)})

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert choice.table(GPU).keys() == set(keys)


def test_what_was_chosen_meanwhile_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that read the tables before they changed must not decide those after."""
    read = tables.read

    def slow(path: Path, gpu: str) -> dict:
        found = read(path, gpu)
        if path == choice.cached(gpu) and not path.exists():
            monkeypatch.setattr(tables, "read", read)
            keep(GPU, HOPPER, {KEY: Measured(SLOW, 1.0, 2.0, True)})
        return found

    monkeypatch.setattr(tables, "read", slow)
    assert choose(P, GPU) == make_plan(P)
    assert bare_of_reason(choose(P, GPU)) == bare_of_reason(SLOW)


SHIPPED = sorted((Path(choice.__file__).parent / "configs").glob("*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_tables_are_whole(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads(path.read_text())
    assert path.stem == choice._file_name(content["gpu"])
    found = tables.read(path, content["gpu"])
    assert len(found) == len(content["plans"]) > 0 and not caplog.records
    assert all(0 < measured.us <= measured.rules_us for measured in found.values())
