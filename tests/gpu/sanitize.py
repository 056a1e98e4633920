"""Every kernel on small shapes with ragged edges, to run under compute-sanitizer (``make sanitize``)."""

import torch

from tests.cases import make_case, oracle, sqnr


def main() -> None:
    worst = 999.0
    shapes = [
        (5, 130, [100, 60], 9, 3),
        (17, 256, [128, 64, 32], 16, 4),
        (70, 256, [192], 24, 5),
        (140, 272, [144], 8, 2),
    ]
    for m, k, widths, r, slots in shapes:
        for layout in ("tensor", "channel", "block"):
            for compute in ("w8a8", "w8a16"):
                case = make_case(m, k, widths, r, slots, layout=layout, compute=compute, b_bias=True, device="cuda")
                for path in ("lora_linear_fused", "lora_linear_hybrid"):
                    worst = min(worst, sqnr(case.run(path), oracle(case)))
        h = torch.ops.epilora.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
        y = torch.zeros(m, sum(widths), dtype=case.x.dtype, device="cuda")
        torch.ops.epilora.expand_add_(y, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
        torch.ops.epilora.quantize_fp8_group(case.x)
    torch.cuda.synchronize()
    print(f"every kernel ran, worst {worst:.1f} dB")
    if not worst > 40:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
