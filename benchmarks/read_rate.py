"""How fast a kernel that only reads goes through memory: the floor under a decode layer, whose weights are read once.

    python -m benchmarks.read_rate 25165824 16777216 100663296 50331648

Prints microseconds and TB/s for each number of bytes (default: the projections of a Qwen3-8B layer, one a kernel, and
1 and 8 GB) and, with ``--out``, writes them with GPU, versions and commit.
"""

import argparse
import json
from pathlib import Path

import torch
import triton
import triton.language as tl

from benchmarks.models import MODELS
from benchmarks.timing import check_out, copies, environment, need_gpu
from torch_epilora.ops.timing import median_times

SHAPES = [(4096, 1, 4), (8192, 1, 8), (4096, 4, 4), (8192, 2, 8), (4096, 8, 8), (4096, 16, 8), (2048, 16, 4)]
"""Words a tile, tiles a program, warps: what is tried, the best of it being the answer."""


@triton.jit
def read(source, found, words, TILE: tl.constexpr, STEPS: tl.constexpr):
    """Set ``found`` where any of the words is negative, which needs every word read; neighbours read neighbours."""
    least = tl.zeros([TILE], tl.int32)
    for step in tl.range(0, STEPS, num_stages=4):
        tile = step * tl.num_programs(0) + tl.program_id(0)
        at = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        least = tl.minimum(least, tl.load(source + at, mask=at < words, other=0))
    if tl.min(least) < 0:
        tl.store(found, 1)


def launch(source: torch.Tensor, found: torch.Tensor, tile: int, steps: int, warps: int) -> None:
    """Read a buffer of 32-bit words once."""
    words = source.numel()
    read[(triton.cdiv(words, tile * steps),)](source, found, words, tile, steps, num_warps=warps)


def read_us(size: int) -> float:
    """Microseconds to read ``size`` bytes that are not in the cache: the median of the best launch shape."""
    made = {"dtype": torch.int32, "device": "cuda"}
    buffers = [torch.randint(0, 2**31 - 1, (size // 4,), **made) for _ in range(copies(size))]
    found = torch.zeros(1, **made)
    variants = {str(shape): lambda copy, shape=shape: launch(buffers[copy], found, *shape) for shape in SHAPES}
    return min(median_times(variants, len(buffers), found.device).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    layer = [k * sum(widths) for k, widths in MODELS["qwen3-8b"].values()]
    parser.add_argument("sizes", nargs="*", type=int, default=[*layer, 10**9, 8 * 10**9])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    check_out(parser, options.out)
    need_gpu()
    rows = []
    for size in options.sizes:
        us = read_us(size)
        rows.append({"bytes": size, "us": round(us, 2), "TB/s": round(size / us / 1e6, 3)})
        print(rows[-1], flush=True)
        torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
