"""How programs of one grid wait for each other on counters in memory, and ask for memory before they may read it."""

import triton
import triton.language as tl

from torch_epilora.ops.triton.common import ASM

CODES, TILES, LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What a signal's first integers count: quantizing programs and tiles of h that are done, GEMM programs that left."""


@triton.jit
def prefetch(addresses, size):
    """Ask for ``size`` bytes (a multiple of 16, or 0) from each address for the L2 cache; later writes are still seen.

    A tensor of fewer elements than the program has threads is held, and asked for, more than once.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred some; // dummy $0
        setp.ne.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        }""",
        "=r,l,r", [addresses.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def arrive(counter):
    """Count this program, after all it has written; return how many came before, whose writes are visible then."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def announce(counter):
    """Count this program, after all that its threads have written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(counter, expected):
    """Wait until ``expected`` programs were counted; what they wrote before is visible then."""
    if ASM:
        # one thread asks; Triton's own atomic would take two barriers at each asking
        tl.inline_asm_elementwise(
            """{
            .reg .pred enough;
            .reg .b32 thread, arrived;
            mov.u32 thread, %tid.x;
            setp.ne.u32 enough, thread, 0;
            @enough bra done;
            again:
            ld.acquire.gpu.global.s32 arrived, [$1];
            setp.ge.s32 enough, arrived, $2;
            @!enough bra again;
            done:
            bar.sync 0;
            mov.b32 $0, 0;
            }""",
            "=r,l,r", [counter.to(tl.int64), expected], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        arrived = tl.atomic_add(counter, 0, sem="acquire")
        while arrived < expected:
            arrived = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def leave(counter):
    """Count this program as one that has done its last waiting; return for ``clear`` how many were counted before.

    The number is on its way when this returns, in one thread's register alone: nothing waits for it before its use.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .b32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            mov.b32 $0, -1;
            @first atom.relaxed.gpu.global.add.s32 $0, [$1], 1;
            }""",
            "=r,l", [counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        return tl.atomic_add(counter, 1, sem="relaxed")


@triton.jit
def clear(counter, ticket, last):
    """Leave a counter at zero for the next call if this program was the last one to ``leave``."""
    if ASM:
        tl.inline_asm_elementwise(
            """{
            .reg .pred mine;
            setp.eq.s32 mine, $1, $2;
            @mine st.global.s32 [$3], 0;
            mov.b32 $0, 0;
            }""",
            "=r,r,r,l", [ticket, last, counter.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    elif ticket == last:
        tl.store(counter, 0)
