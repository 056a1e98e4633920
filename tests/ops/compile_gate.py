"""Compiles what plans admit for an architecture, without a GPU; reports registers, stack and shared memory.

Run as ``python -m tests.ops.compile_gate 90``: a process of its own, since Triton decides at decoration time whether
kernels are interpreted, and the tests of numerics interpret them.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.ops.sass import alone, overwritten
from torch_epilora.ops import choice, dispatch, tables
from torch_epilora.ops.checks import Call, Groups
from torch_epilora.ops.plan import SHARED_BYTES, Plan, Problem, bare, make_plan, refusal, shared_bytes, through
from torch_epilora.ops.triton import pdl
from torch_epilora.ops.triton import quantize as q
from torch_epilora.ops.triton.dequantize import dequantize
from torch_epilora.ops.triton.expand import expand_add, prepare_expand
from torch_epilora.ops.triton.linear import linear
from torch_epilora.ops.triton.outer import outer
from torch_epilora.ops.triton.shrink import prepare_shrink
from torch_epilora.ops.triton.tma import prepare_tma

FP8 = torch.float8_e4m3fn


class NoGpu:
    """Stands in for the CUDA driver: names the target, launches nothing."""

    def __init__(self, arch: int):
        self.arch = arch

    def get_current_device(self):
        return self.arch

    def set_current_device(self, device):
        pass

    def get_current_stream(self, device=None):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)


def tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


class Gate:
    """Collects what the launchers would have launched."""

    def __init__(self, arch: int):
        self.arch, self.capability = arch, divmod(arch, 10)
        self.limit = SHARED_BYTES[self.capability]
        self.kernels: dict[int, tuple[str, int, object]] = {}
        self.label = ""
        self.estimates: dict[str, int] = {}
        driver.set_active(NoGpu(arch))
        pdl.pdl_works = lambda device: True
        dispatch._capability = lambda device: self.capability
        dispatch._gpu = lambda device: "none"
        run = JITFunction.run

        def compile_only(fn, *args, grid, warmup, **kwargs):
            kernel = run(fn, *args, grid=grid, warmup=True, **kwargs)
            label, estimate = f"{fn.__name__} {self.label}", self.estimates.get(fn.__name__, 0)
            self.kernels.setdefault(id(kernel), (label, estimate, kernel))

        JITFunction.run = compile_only

    def problem(
        self, p: Problem, *, slots: int = 4, groups: int = 5, bias: bool = True, rank: bool = True,
        plan: Plan | None = None,
    ) -> None:  # fmt: skip
        """Launch a problem's kernels as ``dispatch`` does."""
        self.label = f"m={p.m} n={p.n} k={p.k} r={p.rank} S={p.slices} {p.layout} {p.compute} {str(p.dtype)[6:]}"
        plan = plan or make_plan(p)
        tiles = {"linear_kernel": plan.gemm, "shrink_kernel": plan.shrink, "expand_kernel": plan.expand}
        self.estimates = {name: shared_bytes(config, p) for name, config in tiles.items()}
        x = torch.empty(p.m, p.k, dtype=p.dtype)
        widths = [p.n // p.slices] * p.slices
        widths[0] += p.n - sum(widths)
        a = [torch.empty(slots, p.rank, p.k, dtype=p.dtype) for _ in widths]
        b = [torch.empty(slots, w, p.rank, dtype=p.dtype) for w in widths]
        b_bias = [torch.empty(slots, w, dtype=p.dtype) for w in widths] if bias else []
        ranks = torch.empty(slots, dtype=torch.int32) if rank else None
        scaling = torch.empty(len(widths), slots) if rank else None
        vec = torch.empty(groups, dtype=torch.int32)
        g = Groups(torch.empty(p.m, dtype=torch.int32), vec, vec, vec, torch.tensor([False]))
        blocks = (-(-p.n // 128), -(-p.k // 128))
        scale = torch.empty({"tensor": (1,), "channel": (p.n, 1), "block": blocks}[p.layout])
        mode = -1 if p.compute == "w8a16" else q.GROUP if p.layout == "block" else q.TOKEN
        beside = self.arch >= 90 and mode >= 0
        h, _ = prepare_shrink(x, a, ranks, scaling, g, plan.shrink, pdl=beside)(x, a, ranks, scaling, g)
        codes, x_scale = q.quantize(x, mode) if mode >= 0 and not beside else (x, None)
        if beside:
            codes, x_scale = q.empty_codes(p.m, p.k, mode, x.device)
            q.prepare_quantize(x, mode, beside=True)(x, codes, x_scale)
        weight = torch.empty(p.n, p.k, dtype=FP8)
        base_bias = torch.empty(p.n, dtype=p.dtype) if bias else None
        adapters = dict(h=h, b=b, b_bias=b_bias, rank=ranks, scaling=scaling, groups=g)
        if plan.base == "own" or plan == make_plan(p):
            linear(codes, x_scale, weight, scale, base_bias, p.layout, p.dtype, plan.gemm, **adapters)
            linear(codes, x_scale, weight, scale, base_bias, p.layout, p.dtype, plan.gemm)
        y = torch.empty(p.m, p.n, dtype=p.dtype)
        expand_add(y, h, b, b_bias, ranks, scaling, g, plan.expand)
        if plan.base == "decode":
            add = prepare_expand(p.m, p.n, p.rank, b, b_bias, ranks, scaling, g, plan.expand, pdl=True)
            add(y, h, b, b_bias, ranks, scaling, g)
        if plan.tma is not None:
            self.estimates["tma_kernel"] = shared_bytes(plan.tma, p)
            for given in ((b, b_bias, ranks, scaling, g), ([], [], None, None, None)):
                k2 = prepare_tma(x, p.k, 1, weight, base_bias, p.layout, plan.tma, *given)
                k2(codes, x_scale, weight, scale, base_bias, h if given[0] else None, *given)

    def decode(
        self, p: Problem, *, codes: str = "made", bias: bool = False, rank: bool = True, beside: bool = False,
        plan: Plan | None = None,
    ) -> None:  # fmt: skip
        """Launch a problem's decode kernel as ``dispatch`` does; rank 0 is the bare base."""
        adapters = "bare" if not p.rank else "many" if min(p.groups - 1, p.m) > 1 else "one"
        self.label = (
            f"m={p.m} n={p.n} k={p.k} r={p.rank} S={p.slices} {adapters} {codes} {p.layout} {p.compute} "
            f"{str(p.dtype)[6:]}"
        )
        plan = plan or through(p, "decode", "own")
        self.estimates = {"decode_kernel": shared_bytes(plan.decode, p)}
        x, weight = torch.empty(p.m, p.k, dtype=p.dtype), torch.empty(p.n, p.k, dtype=FP8)
        widths = [p.n // p.slices] * p.slices
        widths[0] += p.n - sum(widths)
        slots = p.groups - 1 if p.rank else 0
        a = [torch.empty(slots, p.rank, p.k, dtype=p.dtype) for _ in widths] if p.rank else []
        b = [torch.empty(slots, w, p.rank, dtype=p.dtype) for w in widths] if p.rank else []
        b_bias = [torch.empty(slots, w, dtype=p.dtype) for w in widths] if p.rank and bias else []
        vec = torch.empty(p.groups, dtype=torch.int32)
        groups = Groups(torch.empty(p.m, dtype=torch.int32), vec, vec, vec, torch.tensor([not p.rank]))
        blocks = (-(-p.n // 128), -(-p.k // 128))
        scale = torch.empty({"tensor": (1,), "channel": (p.n, 1), "block": blocks}[p.layout])
        x_codes = x_scale = None
        if codes == "given":
            x_codes, x_scale = x.to(FP8), torch.empty(p.m, blocks[1] if p.layout == "block" else 1)
        elif codes == "static":
            x_scale = torch.empty(1)
        call = Call(
            x, x_codes, x_scale, weight, scale, torch.empty(p.n, dtype=p.dtype) if bias else None, a, b, b_bias,
            torch.empty(slots, dtype=torch.int32) if rank and slots else None,
            torch.empty(len(widths), slots) if rank and slots else None, *groups, p.compute,
        )  # fmt: skip
        dispatch._decode(call, plan, bare=beside)(call)

    def shipped(self) -> None:
        """Launch what the shipped tables of GPUs of this architecture name beyond the rules' plans."""
        for path in sorted((Path(choice.__file__).parent / "configs").glob("*.json")):
            head = json.loads(path.read_text())
            if tuple(head["capability"]) != self.capability:
                continue
            for key, measured in tables.read(path, head["gpu"]).items():
                p, plan = tables.problem_of(key, self.capability), measured.plan
                if replace(plan, reason=(rules := make_plan(p)).reason) == rules:
                    continue
                if plan.path == "decode":
                    self.decode(p, plan=plan)
                elif p.rank:
                    self.problem(p, slots=key.adapters, groups=key.adapters + 1, bias=False, plan=plan)
                if plan.base == "decode":
                    self.decode(bare(p), beside=True, plan=plan)

    def probe(self) -> None:
        """Compile what finds out whether dependent launches can be compiled."""
        self.label, self.estimates = "", {}
        pdl.probe_kernel.warmup(grid=(1,), launch_pdl=True)

    def quantizers(self, dtype: torch.dtype) -> None:
        """Launch every quantizer."""
        self.label, self.estimates = f"k=4096 {str(dtype)[6:]}", {}
        x, scale = torch.empty(16, 4096, dtype=dtype), torch.empty(1)
        for mode in (q.TOKEN, q.GROUP, q.STATIC):
            q.quantize(x, mode, scale if mode == q.STATIC else None)

    def training(self, dtype: torch.dtype, k: int, widths: list[int], r: int, slots: int) -> None:
        """Launch what ``lora_linear_train`` has of its own for fp32 adapters."""
        m, self.estimates = 8192, {}
        self.label = f"m={m} n={sum(widths)} k={k} r={r} slots={slots} {str(dtype)[6:]}"
        x, grad = torch.empty(m, k, dtype=dtype), torch.empty(m, sum(widths), dtype=dtype)
        narrow = torch.empty(m, len(widths), r, dtype=dtype)
        ints = [torch.empty(n, dtype=torch.int32) for n in (m, slots + 1, slots + 1, slots + 2)]
        outer(x, narrow, (k,) * len(widths), tuple(ints), [torch.empty(slots, r, k) for _ in widths], by_rank=True)
        outer(grad, narrow, tuple(widths), tuple(ints), [torch.empty(slots, w, r) for w in widths], by_rank=False)
        weight = torch.empty(512, 512, dtype=FP8)
        for scale in (torch.empty(1), torch.empty(512, 1), torch.empty(4, 4)):
            self.label = f"{tuple(scale.shape)} {str(dtype)[6:]}"
            dequantize(weight, scale, torch.empty(512, 512, dtype=dtype), (0, 512), (0, 512))

    def report(self) -> list[dict]:
        rows = []
        with tempfile.TemporaryDirectory() as folder:
            for i, (label, estimate, kernel) in enumerate(self.kernels.values()):
                path = Path(folder) / f"{i}.cubin"
                path.write_bytes(kernel.asm["cubin"])
                usage = subprocess.run([tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True).stdout
                sass = kernel.asm.get("sass") or ""
                if re.match("linear_kernel|decode_kernel|tma_kernel|outer_kernel", label) and self.arch == 90:
                    sass = subprocess.run([tool("cuobjdump"), "-sass", path], capture_output=True, text=True).stdout
                rows.append(
                    {
                        "kernel": label,
                        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
                        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
                        "shared": kernel.metadata.shared,
                        "estimate": estimate,
                        "limit": self.limit,
                        "qgmma": sass.count("QGMMA"),
                        "hgmma": sass.count("HGMMA"),
                        "hmma": sass.count("HMMA"),
                        "alone": alone(sass),
                        "overwritten": overwritten(sass),
                        "dependent": "griddepcontrol.wait" in kernel.asm["ptx"],
                    }
                )
        return rows


def problems(capability: tuple[int, int]) -> list[Problem]:
    """Every bucket the plan tells apart on Hopper, three of them elsewhere, and shapes that are no multiples."""
    tokens = (1, 32, 64, 256, 2048) if capability == (9, 0) else (1, 64, 2048)
    full = [
        Problem(m, 6144, 4096, 64, 3, 5, layout, compute, torch.bfloat16, capability)
        for m, layout, compute in itertools.product(tokens, ("channel", "block"), ("w8a8", "w8a16"))
    ]
    odd = [
        Problem(7, 200, 130, 9, 2, 5, "block", "w8a8", torch.bfloat16, capability),
        Problem(300, 200, 130, 9, 1, 5, "tensor", "w8a16", torch.float16, capability),
        Problem(16, 256, 256, 512, 1, 5, "tensor", "w8a8", torch.float16, capability),
        Problem(2048, 4096, 4096, 512, 2, 5, "channel", "w8a8", torch.bfloat16, capability),
        Problem(33, 1024, 1024, 320, 8, 5, "channel", "w8a8", torch.bfloat16, capability),
        Problem(256, 1024, 1024, 16, 1, 5, "channel", "w8a8", torch.float16, capability),
        Problem(256, 6144, 4096, 64, 3, 33, "channel", "w8a8", torch.bfloat16, capability),
        Problem(512, 4096, 12288, 128, 1, 9, "tensor", "w8a8", torch.float16, capability),
        Problem(64, 24576, 4096, 64, 2, 33, "channel", "w8a8", torch.bfloat16, capability),
        Problem(16, 1024, 1024, 16, 1, 5, "tensor", "w8a16", torch.float16, capability),
        Problem(16, 256, 256, 16, 1, 5, "channel", "w8a8", torch.float32, capability),
        Problem(100, 256, 256, 16, 1, 5, "block", "w8a16", torch.float32, capability),
    ]
    return full + odd


def decodes(capability: tuple[int, int]) -> list[tuple[Problem, dict]]:
    """What the decode kernel tells apart: adapters (none, one, many), ranks, layouts, codes, types, K's remainder."""
    bf16, fp16 = torch.bfloat16, torch.float16
    found = [
        (Problem(m, 6144, 4096, r, 3, groups, "channel", "w8a8", bf16, capability), {})
        for (m, groups), r in itertools.product(((1, 2), (16, 9), (32, 33)), (16, 64, 128))
    ]
    rest = [
        (1, 6144, 4096, 0, 1, 1, "channel", "w8a8", bf16, {}),
        (32, 6144, 4096, 0, 1, 1, "block", "w8a8", bf16, {"bias": True}),
        (16, 4096, 4096, 64, 1, 2, "channel", "w8a8", bf16, {"codes": "given", "rank": False}),
        (16, 24576, 4096, 64, 2, 2, "tensor", "w8a8", fp16, {"codes": "static", "bias": True}),
        (32, 4096, 12288, 64, 1, 33, "tensor", "w8a8", fp16, {"bias": True}),
        (1, 4096, 4096, 64, 1, 2, "block", "w8a8", bf16, {}),
        (32, 4096, 4096, 128, 1, 33, "block", "w8a8", bf16, {"bias": True}),
        (16, 4096, 4096, 64, 1, 9, "block", "w8a8", fp16, {"codes": "given"}),
        (7, 200, 144, 9, 2, 5, "channel", "w8a8", bf16, {"bias": True}),
        (32, 1024, 1024, 16, 8, 128, "channel", "w8a8", bf16, {}),
        (1, 6144, 4096, 64, 3, 2, "channel", "w8a16", bf16, {}),
        (16, 6144, 4096, 64, 3, 9, "channel", "w8a16", bf16, {"bias": True}),
        (32, 6144, 4096, 128, 3, 33, "block", "w8a16", bf16, {}),
        (32, 24576, 4096, 64, 2, 2, "channel", "w8a16", bf16, {}),
        (32, 4096, 12288, 64, 1, 33, "channel", "w8a16", bf16, {"bias": True}),
        (16, 24576, 4096, 64, 2, 9, "channel", "w8a16", fp16, {}),
        (16, 4096, 12288, 128, 1, 2, "channel", "w8a16", fp16, {"bias": True}),
        (64, 6144, 4096, 64, 3, 2, "channel", "w8a8", bf16, {}),
        (64, 24576, 4096, 64, 2, 33, "channel", "w8a8", bf16, {"bias": True}),
        (50, 4096, 12288, 128, 1, 9, "tensor", "w8a8", fp16, {}),
        (64, 24576, 4096, 128, 2, 2, "block", "w8a8", bf16, {}),
        (64, 4096, 4096, 0, 1, 1, "channel", "w8a8", bf16, {"codes": "given"}),
        (64, 24576, 4096, 0, 1, 1, "channel", "w8a8", bf16, {"beside": True}),
        (16, 4096, 4096, 16, 1, 2, "tensor", "w8a16", fp16, {}),
        (32, 4096, 4096, 0, 1, 1, "channel", "w8a16", bf16, {}),
        (32, 4096, 4112, 16, 1, 33, "channel", "w8a16", bf16, {}),
        (16, 24576, 4112, 64, 2, 2, "tensor", "w8a16", bf16, {}),
        (32, 4096, 4096, 72, 1, 33, "channel", "w8a16", bf16, {"bias": True}),
        (32, 5120, 5120, 72, 1, 33, "channel", "w8a8", bf16, {"codes": "static", "bias": True}),
    ]
    return found + [(Problem(*row[:-1], capability), row[-1]) for row in rest]  # type: ignore[arg-type]


def main(arch: int) -> None:
    gate = Gate(arch)
    for p in problems(gate.capability):
        gate.problem(p)
    for p, options in decodes(gate.capability):
        if refusal(through(p, "decode", "own").decode, p) is None:
            gate.decode(p, **options)
    gate.problem(
        Problem(16, 4096, 4096, 16, 1, capability=gate.capability), slots=64, groups=65, bias=False, rank=False
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        gate.quantizers(dtype)
        gate.training(dtype, 4096, [4096, 1024, 1024], 64, 1)
    for r, slots in ((128, 4), (9, 1)):
        gate.training(torch.bfloat16, 4096, [12288, 12288], r, slots)
        gate.training(torch.bfloat16, 130, [100, 60], r, slots)
    gate.shipped()
    if arch >= 90:
        gate.probe()
    print(json.dumps(gate.report()))


if __name__ == "__main__":
    main(int(sys.argv[1]))
