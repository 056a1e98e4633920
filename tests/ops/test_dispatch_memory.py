"""Calls are checked, planned and prepared once for all that are alike, through the operators' own CUDA functions.

Triton's interpreter runs the kernels on the CPU; only the device's capability is made up.
"""

import ctypes
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.cases import Case, make_case, oracle, sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops import choice, dispatch, memory
from torch_epilora.ops.checks import Call
from torch_epilora.ops.plan import through
from torch_epilora.ops.triton import decode, pdl, shrink
from torch_epilora.ops.triton import launch as launches
from torch_epilora.ops.triton.launch import Launch

pytestmark = [
    pytest.mark.usefixtures("repaired"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the same code for real"),
]

PATHS = ["decode", "fused", "hybrid"]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_runs", {})
    monkeypatch.setattr(dispatch, "_last", {})
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_gpu", lambda device: "none")
    monkeypatch.setattr(pdl, "pdl_works", lambda device: False)


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Names of the operators that prepared a call."""
    names: list[str | None] = []
    prepare = dispatch._prepare

    def counted(name: str | None, call: Call) -> dispatch.Run:
        names.append(name)
        return prepare(name, call)

    monkeypatch.setattr(dispatch, "_prepare", counted)
    return names


def small(seed: int = 0, **given: object) -> Case:
    options = {"m": 9, "k": 272, "widths": [70, 33], "r": 8, "slots": 3, "bias": True, "b_bias": True, "poison": False}
    options = {**options, **given}
    return make_case(seed=seed, **options)


def test_a_call_is_planned_anew_once_tables_changed(prepared: list, monkeypatch: pytest.MonkeyPatch) -> None:
    case, run = small(), dispatch._linear(None)
    run(*case.args())
    run(*case.args())
    assert len(prepared) == 1
    monkeypatch.setattr(choice, "_generation", choice.generation() + 1)
    run(*case.args())
    assert len(prepared) == 2


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
@pytest.mark.parametrize("path", PATHS)
def test_a_static_scale_has_any_shape_of_one_element(path: str, shape: tuple[int, ...]) -> None:
    case = small(layout="tensor", codes="static", k=288, widths=[64, 32])
    want = dispatch._linear(path)(*case.args())
    other = replace(case, x_scale=case.x_scale.reshape(shape))
    dispatch._runs.clear()
    assert torch.equal(dispatch._linear(path)(*other.args()), want)


@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
def test_a_static_scale_of_any_shape_reaches_the_vendors_gemm(shape: tuple[int, ...]) -> None:
    case = small(layout="tensor", codes="static", k=288, widths=[64, 32])
    call = Call(*replace(case, x_scale=case.x_scale.reshape(shape)).args())
    run = dispatch.prepare(call, through(dispatch._problem(call), "hybrid", "vendor"))
    assert sqnr(run(call), oracle(case)) > 40


@pytest.mark.parametrize("path", PATHS)
def test_a_call_like_one_before_is_not_prepared_again_and_reads_its_own_tensors(path: str, prepared: list) -> None:
    run = dispatch._linear(path)
    for seed in range(3):
        case = small(seed)
        assert sqnr(run(*case.args()), oracle(case)) > 40
    assert prepared == [path]


def changed(name: str, change: Callable[[Tensor], Tensor], index: int | None = None) -> Callable[[Case], Case]:
    def edit(case: Case) -> Case:
        if index is None:
            return replace(case, **{name: change(getattr(case, name))})
        several = list(getattr(case, name))
        several[index] = change(several[index])
        return replace(case, **{name: several})

    return edit


def wider(t: Tensor) -> Tensor:
    """The same values in rows that are further apart."""
    return torch.cat([t, t], -1)[..., : t.shape[-1]]


def shifted(t: Tensor) -> Tensor:
    """The same values one byte further on."""
    room = torch.empty(t.numel() + 1, dtype=torch.uint8)
    return room[1:].view(t.dtype).view(t.shape).copy_(t)


OTHERS: dict[str, Callable[[Case], Case]] = {
    "tokens": lambda case: small(m=10),
    "type": lambda case: small(dtype=torch.float16),
    "slots": lambda case: small(slots=4),
    "rank": lambda case: small(r=9),
    "layout": lambda case: small(layout="block"),
    "compute": lambda case: small(compute="w8a16"),
    "codes": lambda case: small(codes="given"),
    "static": lambda case: small(codes="static"),
    "bias": lambda case: replace(case, bias=None),
    "b_bias": lambda case: replace(case, b_bias=[]),
    "no rank vector": lambda case: replace(case, rank=None),
    "one rank vector": lambda case: replace(case, rank=case.rank[0].clone()),
    "no scaling": lambda case: replace(case, scaling=None),
    "x strides": changed("x", wider),
    "weight strides": changed("weight", lambda t: wider(t.view(torch.uint8)).view(t.dtype)),
    "weight alignment": changed("weight", shifted),
    "scale shape": changed("weight_scale", lambda t: t[:, 0]),
    "a strides": lambda case: replace(case, a=[wider(t) for t in case.a]),
    "b strides": lambda case: replace(case, b=[wider(t) for t in case.b]),
    "nobody": lambda case: replace(case, groups=case.groups._replace(no_adapter=torch.tensor([True]))),
}


@pytest.fixture(params=["torch's check", "none"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's own check of tensors and without."""
    assert memory.TensorGuards is not None
    if request.param == "none":
        monkeypatch.setattr(memory, "TensorGuards", None)


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("change", [
    lambda t: t[:1], lambda t: t.t(), lambda t: wider(t), lambda t: t.view(torch.int16), lambda t: t[None],
    lambda t: t.to("meta"),
])  # fmt: skip
def test_tensors_are_alike_whose_sizes_strides_types_and_devices_are(change: Callable[[Tensor], Tensor]) -> None:
    first, second = (torch.zeros(2, 2, dtype=torch.bfloat16) for _ in range(2))
    alike = memory.like([first, second])
    assert alike(second, first) and alike(first, first.clone())
    assert not alike(first, change(second)) and not alike(change(first), second)


def test_calls_that_take_turns_are_prepared_once_each(prepared: list) -> None:
    """One layer's metadata may be longer than the next one's."""
    case = small()
    longer = replace(case, groups=case.groups._replace(starts=torch.cat([case.groups.starts, torch.zeros(3).int()])))
    run = dispatch._linear("fused")
    for one in (case, longer, case, longer):
        assert sqnr(run(*one.args()), oracle(case)) > 40
    assert len(prepared) == len(dispatch._runs) == 2 and len(dispatch._last) == 1


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_prepared_anew_and_right(name: str, prepared: list) -> None:
    first = small()
    other = OTHERS[name](first)
    run = dispatch._linear("hybrid")
    run(*first.args())
    got = run(*other.args())
    assert len(prepared) == 2
    want = replace(other, row_slots=[-1] * 9) if name == "nobody" else other
    if name == "one rank vector":
        want = replace(other, rank=other.rank.expand(2, -1))
    assert sqnr(got, oracle(want)) > 40
    assert len(dispatch._runs) == 2


def test_a_bad_call_is_refused_each_time_and_not_kept(prepared: list) -> None:
    case = small()
    run = dispatch._linear(None)
    run(*case.args())
    for _ in range(2):
        with pytest.raises(TypeError, match=r"rank: expected dtype int32, got int64"):
            run(*replace(case, rank=case.rank.long()).args())
    assert len(prepared) == 3 and len(dispatch._runs) == 1
    run(*case.args())
    assert len(prepared) == 3


def test_the_path_asked_for_and_dependent_launches_are_part_of_it(
    prepared: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = small()
    for path in (*PATHS, *PATHS):
        dispatch._linear(path)(*case.args())
    assert prepared == PATHS
    monkeypatch.setattr(pdl, "pdl_works", lambda device: True)
    monkeypatch.setattr(dispatch, "_prepare", lambda name, call: lambda call: "anew")
    assert dispatch._linear("decode")(*case.args()) == "anew"


def test_a_gpu_without_dependent_launches_is_not_asked_for_them(
    prepared: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: torch.device) -> bool:
        raise AssertionError("a kernel would have been compiled")

    monkeypatch.setattr(pdl, "pdl_works", refuse)
    monkeypatch.setattr(dispatch, "_capability", lambda device: (8, 9))
    monkeypatch.setattr(dispatch, "_gpu", lambda device: "none")
    case = small(compute="w8a16")
    assert sqnr(dispatch._linear(None)(*case.args()), oracle(case)) > 40
    assert prepared == [None]


@pytest.mark.parametrize(("m", "slots", "path", "dependent"), [
    (100, 3, "fused", "quantize_kernel"), (100, 3, "hybrid", "quantize_kernel"), (40, 20, "hybrid", "decode_kernel"),
])  # fmt: skip
def test_nothing_is_taken_between_a_kernel_and_the_one_that_runs_beside_it(
    m: int, slots: int, path: str, dependent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that another thread's call has let go of in between may still be in use when the dependent starts."""
    log, launched, held = [], [], []
    empty, empty_strided = torch.empty, torch.empty_strided

    def launch(self, on: Tensor, *pointers: object) -> None:
        log.append(self._kernel.fn.__name__)
        launched.append(self)
        if self._kernel.fn.__name__ == dependent:
            held.extend(ref() is not None for ref in scratch)

    def noted(module, name: str, keep: bool):
        take = getattr(module, name)

        def taken(*arguments, **options):
            log.append("take")
            t = take(*arguments, **options)
            if keep:
                scratch.append(weakref.ref(t))
            return t

        monkeypatch.setattr(module, name, taken)

    scratch: list[weakref.ref] = []
    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(pdl, "pdl_works", lambda device: True)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: (log.append("take"), empty(*a, **k))[1])
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: (log.append("take"), empty_strided(*a, **k))[1])
    noted(shrink, "take_signal", True)
    noted(decode, "take_signal", False)
    case = small(m=m, k=1024, slots=slots)
    log.clear()
    dispatch._linear(path)(*case.args())
    at = log.index("shrink_kernel")
    assert log[at + 1] == dependent and "take" in log[:at]
    assert scratch and all(held), "K1's counters outlive the launch of what runs beside it"
    beside = next(launch for launch in launched if launch._kernel.fn.__name__ == dependent)
    assert beside._constants["launch_pdl"] and beside._constants["BESIDE"]


@pytest.mark.parametrize(
    ("codes", "options"), [("made", {}), ("static", {"rank": None}), ("given", {"scaling": None, "b_bias": []})]
)
@pytest.mark.parametrize(
    ("m", "slots", "path", "last"),
    [(70, 3, "fused", "tma_kernel"), (70, 3, "hybrid", "expand_kernel"), (40, 20, "hybrid", "expand_kernel")],
)
def test_launches_by_address_compute_the_same(
    m: int, slots: int, path: str, last: str, options: dict, codes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes no addresses: tensors are made of them, of the types and sizes launched with before."""
    call, kinds, direct = Launch.__call__, {}, []

    def tensor(address: int, like: tuple[torch.dtype, int]) -> Tensor:
        dtype, size = like
        room = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(address)
        return torch.frombuffer(room, dtype=torch.uint8).view(dtype)

    def launch(self, on: Tensor | int, *pointers) -> None:
        several = [p if type(p) is tuple else (p,) for p in pointers]
        if type(on) is not int:
            kinds[self] = [[None if isinstance(t, TensorDescriptor) else (t.dtype, t.numel()) for t in ts]
                           for ts in several]  # fmt: skip
            return call(self, on, *pointers)
        direct.append(self._kernel.fn.__name__)
        made = [tuple(t if like is None else tensor(t, like) for t, like in zip(ts, likes, strict=True))
                for ts, likes in zip(several, kinds[self], strict=True)]  # fmt: skip
        call(self, torch.empty(0), *(t if type(p) is tuple else t[0] for p, t in zip(pointers, made, strict=True)))

    monkeypatch.setattr(Launch, "__call__", launch)
    monkeypatch.setattr(launches, "stream_for", lambda device, addresses: 0 if all(addresses) else None)
    run = dispatch._linear(path)
    sizes = {"m": m, "k": 144, "slots": slots, "codes": codes}
    first, other = (replace(small(seed, **sizes), **options) for seed in range(2))
    got = run(*first.args())
    assert not direct and torch.equal(run(*first.args()), got)
    assert direct[0] == "shrink_kernel" and direct[-1] == last
    assert sqnr(run(*other.args()), oracle(other)) > 40
    assert len(dispatch._runs) == 1


def test_a_decode_kernel_beside_k1_serves_many_adapters() -> None:
    case = small(m=40, slots=20)
    assert dispatch.plan_of(*case.args()).base == "decode"
    got = dispatch._linear(None)(*case.args())
    assert sqnr(got, oracle(case)) > 40
    bare = [row for row, slot in enumerate(case.row_slots) if slot < 0]
    nobody = replace(case, groups=case.groups._replace(no_adapter=torch.tensor([True])))
    assert bare and torch.equal(got[bare], dispatch._linear(None)(*nobody.args())[bare])


def test_what_is_kept_is_bounded_and_holds_no_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    import gc

    monkeypatch.setattr(memory, "MOST", 2)
    for m in range(1, 6):
        case = small(m=m)
        dispatch._linear("hybrid")(*case.args())
        assert 1 <= len(dispatch._runs) <= 2 and 1 <= len(dispatch._last) <= 2
    held = [weakref.ref(t) for t in (case.x, case.weight, *case.a, *case.b)]
    del case
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
