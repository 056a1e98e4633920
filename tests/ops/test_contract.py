"""What torch asks of an operator: opcheck, fakes that agree, one graph for all token counts, a light import."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

import torch_epilora
from tests.cases import FP8, Case, make_case
from torch_epilora.ops.schemas import LINEAR_OPS, SCHEMAS

EPILORA = torch.ops.epilora
Call = tuple[str, tuple]


def case_of(**options) -> Case:
    return make_case(5, 130, [48, 20], 8, 3, **{"b_bias": True, **options})


def backward_args(case: Case) -> tuple:
    grad = torch.randn(case.x.shape[0], case.weight.shape[0]).to(case.x.dtype)
    weights = (case.weight, case.weight_scale, case.a, case.b, case.b_bias)
    return (grad, case.x, *weights, case.rank, case.scaling, *case.groups, True)


def calls() -> dict[str, Call]:
    """Valid calls of every operator by name of the test."""
    case, x = case_of(), torch.randn(5, 130)
    h = torch.randn(5, 2, 8).bfloat16()
    y = torch.randn(5, 68).bfloat16()
    found: dict[str, Call] = {
        "token": ("quantize_fp8_token", (x,)),
        "group": ("quantize_fp8_group", (x.bfloat16(),)),
        "tensor": ("quantize_fp8_tensor", (x.half(),)),
        "static": ("quantize_fp8_static", (x, torch.tensor([0.1]))),
        **{f"weight_{name}": ("quantize_fp8_weight", (x, name)) for name in ("tensor", "channel", "block")},
        "groups": ("adapter_groups", (torch.tensor([2, -1, 0], dtype=torch.int32), 12, 3)),
        "shrink": ("shrink", (case.x, case.a, case.rank, case.scaling, *case.groups[:4])),
        "expand": ("expand_add_", (y, h, case.b, case.b_bias, case.rank, case.scaling, *case.groups[:4])),
        "add": (
            "lora_add_",
            (y, case.x, case.a, case.b, case.b_bias, case.rank, case.scaling, *case.groups),
        ),
        "backward": ("lora_linear_backward", backward_args(case)),
    }
    for layout in ("tensor", "channel", "block"):
        found[f"linear_{layout}"] = ("lora_linear", make_case(5, 300, [130, 20], 8, 3, layout=layout).args())
    for name, options in (
        ("w8a16", {"compute": "w8a16"}),
        ("given", {"codes": "given"}),
        ("static_scale", {"codes": "static"}),
        ("plain", {"bias": False, "b_bias": False, "mixed_ranks": False, "poison": False}),
    ):
        found[f"linear_{name}"] = ("lora_linear", case_of(**options).args())
    bare = case_of()
    bare.a, bare.b, bare.b_bias, bare.rank, bare.scaling = [], [], [], None, None
    found["linear_bare"] = ("lora_linear", bare.args())
    return found | {path: (path, case.args()) for path in LINEAR_OPS[1:]}


CALLS = calls()


def flat(values: object) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for v in values for t in flat(v)] if isinstance(values, list | tuple) else []


def test_every_operator_is_called() -> None:
    assert {op for op, _ in CALLS.values()} == {*SCHEMAS, "lora_linear_backward"}


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name: str) -> None:
    op, arguments = CALLS[name]
    tests = ["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if not any(t.dtype == FP8 for t in flat(arguments)):  # its comparison has no kernel for e4m3 (pytorch#135998)
        tests.append("test_schema")
    torch.library.opcheck(getattr(EPILORA, op).default, arguments, test_utils=tests)


@pytest.mark.parametrize("needs", ["x", "adapters", "all"])
def test_opcheck_with_gradients(needs: str) -> None:
    case = case_of(compute="w8a16", poison=False)
    if needs != "adapters":
        case.x.requires_grad_()
    if needs != "x":
        for t in (*case.a, *case.b, *case.b_bias):
            t.requires_grad_()
    if needs == "all":
        case.bias.requires_grad_()
    torch.library.opcheck(
        EPILORA.lora_linear.default, case.args(),
        test_utils=["test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"],
    )  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_only_what_adds_changes_an_argument_and_no_output_is_one(name: str) -> None:
    """opcheck's schema test for what it cannot compare: every argument's bytes, before and after."""
    op, arguments = CALLS[name]
    before = [t.clone().view(-1).view(torch.uint8) for t in flat(arguments)]
    outputs = flat(getattr(EPILORA, op)(*arguments))
    after = [t.view(-1).view(torch.uint8) for t in flat(arguments)]
    changed = [i for i, (a, b) in enumerate(zip(after, before, strict=True)) if not torch.equal(a, b)]
    assert changed == ([0] if op in ("expand_add_", "lora_add_") else [])
    owned = {t.untyped_storage().data_ptr() for t in flat(arguments) if t.numel()}
    assert not owned & {t.untyped_storage().data_ptr() for t in outputs if t.numel()}


# --- fakes -------------------------------------------------------------------------------------------------------


def agrees(op: str, arguments: tuple) -> None:
    """The fake's outputs have the shapes, dtypes and strides of the real ones."""
    real = flat(getattr(EPILORA, op)(*arguments))
    with FakeTensorMode() as mode:
        fakes = flat(getattr(EPILORA, op)(*tree_map_only(Tensor, mode.from_tensor, arguments)))
    assert len(real) == len(fakes)
    for r, f in zip(real, fakes, strict=True):
        assert (r.shape, r.dtype, r.device, r.layout) == (f.shape, f.dtype, f.device, f.layout)
        assert r.stride() == f.stride(), f"{op}: {tuple(r.shape)} has strides {r.stride()}, the fake {f.stride()}"


@pytest.mark.parametrize("name", CALLS)
def test_fakes_agree(name: str) -> None:
    agrees(*CALLS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "view", ["plain", "rows_apart", "one_row_apart", "rows_again", "one_column", "no_rows", "transposed"]
)
def test_fakes_agree_on_strided_inputs(view: str, dtype: torch.dtype) -> None:
    room = torch.randn(6, 200).to(dtype)
    x = {
        "plain": room,
        "rows_apart": room[:, :130],
        "one_row_apart": room[2:3, :130],
        "rows_again": room[:1].expand(6, 200),
        "one_column": room[:, 7:8],
        "no_rows": room[:0],
        "transposed": room[:1].t(),
    }[view]
    for op in ("quantize_fp8_token", "quantize_fp8_group", "quantize_fp8_tensor"):
        agrees(op, (x,))
    agrees("quantize_fp8_static", (x, torch.tensor([0.1])))
    if x.shape[0]:
        for layout in ("tensor", "channel", "block"):
            agrees("quantize_fp8_weight", (x, layout))
    for compute in ("w8a8", "w8a16"):
        case = make_case(x.shape[0], x.shape[1], [24, 8], 4, 2, compute=compute, dtype=dtype)
        case.x = x
        agrees("lora_linear", case.args())
        agrees("shrink", (x, case.a, case.rank, case.scaling, *case.groups[:4]))
        agrees("lora_linear_backward", backward_args(case))


def test_fakes_agree_on_adapters_inside_larger_buffers() -> None:
    """Strided A and B, as an engine's own slots may be: gradients come with the strides the fake promised."""
    case = make_case(5, 64, [16, 8], 4, 2, poison=False)
    case.a = [torch.zeros(2, 9, 64, dtype=torch.bfloat16)[:, :4].copy_(t) for t in case.a]
    case.b = [torch.zeros(2, t.shape[1], 9, dtype=torch.bfloat16)[..., :4].copy_(t) for t in case.b]
    agrees("lora_linear", case.args())
    agrees("lora_linear_backward", backward_args(case))


# --- torch.compile -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def projection(case: Case) -> Callable[[Tensor, Tensor], Tensor]:
    """The forward of a layer: groups from the slots, then the projection, then something to fuse with."""

    def forward(x: Tensor, slots: Tensor) -> Tensor:
        groups = EPILORA.adapter_groups(slots, x.shape[0], case.a[0].shape[0])
        y = EPILORA.lora_linear(
            x * 2, None, None, case.weight, case.weight_scale, case.bias, case.a, case.b, case.b_bias, case.rank,
            case.scaling, *groups, case.groups.no_adapter, case.compute,
        )  # fmt: skip
        return y.relu()

    return forward


def slots_of(rows: int, slots: int) -> Tensor:
    return torch.randint(-1, slots, (rows,), dtype=torch.int32)


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_one_graph_serves_all_token_counts_ranks_and_scalings(compute: str) -> None:
    case = make_case(64, 96, [32, 16], 64, 3, compute=compute, poison=False, mixed_ranks=True)
    counter = CompileCounter()
    forward = projection(case)
    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend=counter)
    for m in (37, 64, 17, 1, 2, 3, 8, 33, 63, 1):  # dynamo ties the first to any dimension of its size: none is 37
        slots = slots_of(m, 3)
        x = case.x[:m].clone()  # a view is guarded by its base's size too
        assert torch.equal(compiled(x, slots), forward(x, slots))
    for r, scaling in ((8, 1.0), (16, 0.5), (64, 2.0), (0, 1.0)):
        case.rank.fill_(r)
        case.scaling.fill_(scaling)
        slots = slots_of(40, 3)
        x = case.x[:40].clone()
        assert torch.equal(compiled(x, slots), forward(x, slots))
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_quantizers_and_expand_compile_into_one_graph() -> None:
    case = make_case(24, 256, [32, 16], 8, 3)

    def forward(x: Tensor, y: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
        tokens = EPILORA.adapter_groups(slots, x.shape[0], 3)
        codes, scale = EPILORA.quantize_fp8_token(x)
        groups = EPILORA.quantize_fp8_group(x)[1]
        again = EPILORA.quantize_fp8_static(x, EPILORA.quantize_fp8_tensor(x)[1])
        h = EPILORA.shrink(x, case.a, case.rank, case.scaling, *tokens)
        y = y + 1
        EPILORA.expand_add_(y, h, case.b, [], case.rank, case.scaling, *tokens)
        return codes.float() * scale, groups, again.float(), y

    compiled = torch.compile(forward, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (24, 11):
        inputs = case.x[:m].clone(), torch.randn(m, 48).bfloat16(), slots_of(m, 3)
        for got, want in zip(compiled(*inputs), forward(*inputs), strict=True):
            assert torch.equal(got, want)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_inductor() -> None:
    case = make_case(16, 64, [32], 8, 2)
    forward = projection(case)
    compiled = torch.compile(forward, fullgraph=True, dynamic=True)
    for m in (16, 5):
        slots = slots_of(m, 2)
        assert torch.equal(compiled(case.x[:m], slots), forward(case.x[:m], slots))


# --- import ------------------------------------------------------------------------------------------------------

OPTIONAL = ("transformers", "peft", "typer", "rich", "gguf", "vllm", "compressed_tensors", "triton")
IMPORT = f"""
import sys
for name in {OPTIONAL}:
    sys.modules[name] = None              # importing it raises ImportError
import torch
def touched(*args, **kwargs):
    raise RuntimeError("the GPU was touched")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = touched
torch.cuda.get_device_capability = torch.cuda.current_device = touched
import torch_epilora
from torch_epilora import ops
codes, scale = torch.ops.epilora.quantize_fp8_weight(torch.randn(32, 16), "channel")
groups = ops.adapter_groups(torch.tensor([0, -1], dtype=torch.int32), 4, 1)
y = ops.lora_linear(torch.randn(4, 16), codes, scale, [torch.randn(1, 2, 16)], [torch.randn(1, 32, 2)], groups)
assert y.shape == (4, 32) and not torch.cuda.is_initialized()
print([m for m in sys.modules if m.startswith("torch_epilora.ops.triton")])
"""


def test_import_touches_no_gpu_and_no_optional_library() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(torch_epilora.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


def test_no_file_is_long() -> None:
    files = list(Path(torch_epilora.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    assert {f.name: n for f in files if (n := len(f.read_text(encoding="utf-8").splitlines())) > 600} == {}


def test_the_paths_take_the_same_arguments() -> None:
    schemas = {str(getattr(EPILORA, name).default._schema).partition("(")[2] for name in LINEAR_OPS}
    assert len(schemas) == 1


def test_inductor_does_not_capture_what_reads_the_host():
    for name in (*LINEAR_OPS, "lora_linear_backward"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.epilora, name).default.tags
    assert torch.Tag.cudagraph_unsafe not in torch.ops.epilora.shrink.default.tags
