"""Every kernel on small shapes with ragged edges, to run under compute-sanitizer (``make sanitize``).

``python -m tests.gpu.sanitize 2 8`` runs the third of eight parts: a checker takes minutes, and parts run side by side.
"""

import itertools
import os
import sys

import torch

from tests.cases import Case, make_case, oracle, sqnr
from tests.gpu.paths import decode_serves, paths_at
from tests.layers import Layer
from torch_epilora.ops.triton.pdl import pdl_works

SHAPES = [
    (5, 130, [100, 60], 9, 3),
    (17, 256, [128, 64, 32], 16, 4),
    (70, 256, [192], 24, 5),
    (140, 272, [144], 8, 2),
]
DECODES = [
    (1, 144, [100, 60], 9, 1),
    (8, 1040, [128, 33], 64, 1),
    (17, 272, [128, 64, 32], 16, 4),
    (32, 528, [72], 128, 32),
    (50, 272, [72, 40], 24, 5),
]


def cases(shapes: list[tuple]) -> list[Case]:
    kinds = itertools.product(("tensor", "channel", "block"), ("w8a8", "w8a16"))
    return [
        make_case(*shape, layout=layout, compute=compute, b_bias=True, device="cuda")
        for shape, (layout, compute) in itertools.product(shapes, kinds)
    ]


def run(case: Case, path: str) -> float:
    return sqnr(case.run(path), oracle(case))


def dependent(wanted: bool) -> None:
    """Launch decode kernels as dependents of the kernel before, where the GPU can, or not."""
    os.environ["EPILORA_DISABLE_PDL"] = "0" if wanted else "1"
    pdl_works.cache_clear()


def main(part: int = 0, parts: int = 1) -> None:
    worst = 999.0
    for case in cases(SHAPES)[part::parts]:
        for path in ("lora_linear_fused", "lora_linear_hybrid"):
            worst = min(worst, run(case, path))
        h = torch.ops.epilora.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
        y = torch.zeros(case.x.shape[0], case.weight.shape[0], dtype=case.x.dtype, device="cuda")
        torch.ops.epilora.expand_add_(y, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
        torch.ops.epilora.quantize_fp8_group(case.x)
    for dtype, slots in itertools.product((torch.bfloat16, torch.float32), (1, 3)):
        layer = Layer(m=77, k=130, widths=(100, 60), r=9, slots=slots, dtype=dtype, device="cuda")
        y = layer.run()
        torch.autograd.grad(y, layer.leaves, layer.grad)
        worst = min(worst, sqnr(y, layer.plain([t.double() for t in layer.leaves])))
    decodes = [path for path, _ in paths_at(1) if path == "lora_linear_decode"]
    for path, wanted in itertools.product(decodes, (False, True)):
        dependent(wanted)
        served = [case for case in cases(DECODES) if decode_serves(case.x.shape[0], case.compute)]
        for case in served[part::parts]:
            worst = min(worst, run(case, path))
            case.groups = case.groups._replace(no_adapter=torch.tensor([True]))
            case.row_slots = [-1] * len(case.row_slots)
            worst = min(worst, run(case, path))
    torch.cuda.synchronize()
    print(f"every kernel ran, worst {worst:.1f} dB")
    if not worst > 40:
        raise SystemExit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
