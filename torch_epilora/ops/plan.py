"""Launch plans: a projection's path and tiles, and the one predicate that says what an architecture admits.

A plan is a pure function of a :class:`Problem`, so the same batch gets the same kernels and the same bits, run to run.
"""

from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import BLOCK

SHARED_BYTES = {(8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}
"""Shared memory one block may use, by compute capability (CUDA C++ programming guide, technical specifications)."""

MULTIPROCESSORS = 132
"""Multiprocessors that plans fill: a Hopper GPU's. Another count changes how well a plan fits, never its result."""

DECODE_MAX_TOKENS = 64
DECODE_MAX_RANK = 128
DECODE_MAX_GROUPS = 128
"""What one tile of the decode kernel holds: all tokens, each as often as it has codes, all ranks of a slot, and the
batch's groups in registers."""

FUSED_MAX_TOKENS = 32
FUSED_MAX_ADAPTERS = 2
OWN_MAX_TOKENS = 64
TMA_MAX_BLOCKS = 192
MANY_MIN_TOKENS = 32
MANY_MIN_ADAPTERS = 16
"""Where the paths and the two GEMMs change places on an H200 (benchmarks/NOTES.md)."""


@dataclass(frozen=True)
class Problem:
    """What a plan depends on: the projection, the batch size bucket and the GPU.

    Attributes
    ----------
    m, n, k : int
        Tokens, outputs, inputs.
    rank : int
        Rank the slots hold; 0 for a call without adapters.
    slices : int
        Output slices.
    groups : int
        Entries of the batch metadata: slots and the bare base.
    layout : str
        Weight-scale layout, "tensor", "channel" or "block".
    compute : str
        "w8a8" or "w8a16".
    dtype : torch.dtype
        Of the activations.
    capability : tuple of int
        Compute capability of the GPU.
    codes : bool
        Whether the activations' codes are handed in.
    """

    m: int
    n: int
    k: int
    rank: int = 0
    slices: int = 1
    groups: int = 2
    layout: str = "channel"
    compute: str = "w8a8"
    dtype: torch.dtype = torch.bfloat16
    capability: tuple[int, int] = (9, 0)
    codes: bool = False


@dataclass(frozen=True)
class Gemm:
    """Tiles of K2: tokens, outputs and inputs a block, and ranks added at once in the epilogue."""

    block_m: int
    block_n: int
    block_k: int
    block_r: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Tma:
    """Tiles of K2 for more tokens than a decode batch: tokens, outputs and inputs a block, ranks added at once.

    ``b_stages`` up-projections are in flight in the epilogue.
    """

    block_m: int
    block_n: int
    block_k: int
    block_r: int
    num_warps: int
    num_stages: int
    b_stages: int


@dataclass(frozen=True)
class Shrink:
    """Tiles of K1: tokens, ranks and inputs a block; ``split_k`` blocks share one sum over K, the last one adds up."""

    block_m: int
    block_r: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Expand:
    """Tiles of the expand: tokens and outputs a block, ranks at once; a program walks ``run`` blocks of outputs.

    ``early`` launches it as the GEMM's dependent: its blocks are there when the GEMM's end.
    """

    block_m: int
    block_n: int
    block_r: int
    run: int
    num_warps: int
    num_stages: int
    early: bool = False


@dataclass(frozen=True)
class Decode:
    """Tiles of the decode kernel: the GEMM's tokens, outputs and inputs a block, then those of its other two roles.

    A block of the quantizer takes ``part`` columns of a row; one of the shrink makes ``shrink_r`` ranks of
    ``shrink_m`` rows from its share of the inputs, one of ``split_k``, ``shrink_k`` at a time. The GEMM makes
    ``together`` up-projections at once if there are many, with ``b_stages`` times as many in flight. ``ahead`` bytes of
    each row of weights are asked for before the kernel before this one has ended, and B and h are read ``early`` steps
    before the main loop ends. ``overlap`` lets the kernel after this one start beside the main loop.
    """

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    part: int
    shrink_m: int
    shrink_r: int
    shrink_k: int
    shrink_stages: int
    split_k: int
    together: int
    b_stages: int
    ahead: int
    early: int
    overlap: bool
    num_warps: int


@dataclass(frozen=True)
class Plan:
    """A path, the reason it was chosen, what computes the base, and every kernel's tiles.

    The base is that of K2 ("own"), of K2 for more tokens ("tma"), of PyTorch ("vendor") or of the decode kernel
    ("decode", whose tiles are then those of the bare base). ``tma`` is None where K2 for more tokens cannot run or
    there are no more.
    """

    path: str
    reason: str
    base: str
    gemm: Gemm
    tma: Tma | None
    shrink: Shrink
    expand: Expand
    decode: Decode


def _size(dtype: torch.dtype) -> int:
    return torch.empty((), dtype=dtype).element_size()


Tiles = Gemm | Tma | Shrink | Expand | Decode


def shared_bytes(config: Tiles, problem: Problem) -> int:
    """Estimate a kernel's shared memory in bytes: its pipelined tiles, or the epilogue's if those are larger."""
    x = 1 if problem.compute == "w8a8" else _size(problem.dtype)
    full = _size(problem.dtype)
    if isinstance(config, Gemm):
        widened = 0 if problem.compute == "w8a8" else config.block_n * config.block_k * full
        stage = config.block_n * config.block_k + config.block_m * config.block_k * x
        epilogue = (config.block_n + config.block_m) * config.block_r * full
        return max(stage * config.num_stages + widened, epilogue, config.block_n * config.block_m * full)
    if isinstance(config, Tma):
        loop = (config.block_n + config.block_m) * config.block_k * config.num_stages
        rank = _rank_block(problem, config.block_r) * full
        return max(loop, (config.block_n + config.block_m) * rank * config.b_stages) + (1 << 10)
    if isinstance(config, Decode):
        stage = (config.block_n + config.block_m * _columns(problem)) * config.block_k
        scales = (config.block_n + config.block_m) * 4 * (problem.layout == "block")
        stage += scales
        rank = _rank_block(problem, DECODE_MAX_RANK) * full
        shrink = (config.shrink_m + config.shrink_r) * config.shrink_k * full * config.shrink_stages
        late = rank * (config.together * config.block_n * config.b_stages + config.block_m)
        early = stage * config.num_stages + rank * (config.block_n + config.block_m)
        scratch = 2 << 10  # of reductions
        return max(early, shrink, late + scales * config.num_stages + scratch)
    if isinstance(config, Shrink):
        return (config.block_m + config.block_r) * config.block_k * full * config.num_stages
    tiles = (config.block_r + config.block_m) * config.block_n * full * config.num_stages
    return max(tiles + config.block_m * config.block_r * full, config.block_m * config.block_n * 4)


def refusal(config: Tiles, problem: Problem) -> str | None:
    """Say why a configuration cannot run a problem, or None if it can. The only validity predicate of the library.

    Parameters
    ----------
    config : Gemm, Tma, Shrink, Expand or Decode
        Tiles of one kernel.
    problem : Problem
        The projection and the GPU.

    Returns
    -------
    str or None
        The reason, for people.
    """
    limit = SHARED_BYTES.get(problem.capability)
    if limit is None:
        return unsupported(problem.capability)
    for field in fields(config):
        value, least = getattr(config, field.name), 1 if field.name == "together" else 16
        tile = field.name.startswith("block") or field.name in ("shrink_m", "shrink_r", "shrink_k", "together")
        if tile and (value < least or value & (value - 1)):
            return f"{field.name}={value} is not a power of two of at least {least}"
    if isinstance(config, Decode):
        missing = _decode_refusal(problem)
        if missing:
            return missing
        if config.block_m < problem.m:
            return f"block_m={config.block_m} is less than the {problem.m} tokens that its one tile must hold"
        if config.ahead % 32 or config.ahead > problem.k:
            return f"ahead={config.ahead} is not a multiple of 32 within {problem.k} inputs"
        if config.part < BLOCK or config.part & (config.part - 1):
            return f"part={config.part} is not a power of two of at least {BLOCK}"
        if config.block_k < 32:
            return f"block_k={config.block_k} is less than the 32 inputs of an FP8 MMA"
    if isinstance(config, Tma):
        missing = _tma_refusal(problem)
        if missing:
            return missing
    if isinstance(config, Gemm | Decode) and problem.layout == "block" and config.block_k != BLOCK:
        return f"block_k={config.block_k} must be {BLOCK} under 128x128 scales"
    if isinstance(config, Gemm | Tma | Expand) and config.block_r > 128:
        return f"block_r={config.block_r} is more than 128 ranks at once, which spills registers"
    used = shared_bytes(config, problem)
    if used > limit:
        return f"needs {used} bytes of shared memory, and a block has {limit}"
    return None


def _decode_refusal(p: Problem) -> str | None:
    """Say why the decode kernel cannot run a problem with any tiles, or None if it can."""
    if p.capability < (9, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} has no programmatic dependent launch; 9.0 has"
    if p.m > _decode_tokens(p):
        return f"{p.m} tokens are more than the {_decode_tokens(p)} of one tile"
    if p.rank > DECODE_MAX_RANK:
        return f"rank {p.rank} is more than the {DECODE_MAX_RANK} of one tile"
    if p.groups > DECODE_MAX_GROUPS:
        return f"{p.groups} groups are more than the {DECODE_MAX_GROUPS} it holds in registers"
    if p.dtype == torch.float32:
        return "float32 activations have no tensor cores to use"
    return f"inputs come in multiples of 16, not {p.k}" if p.k % 16 else None


def _tma_refusal(p: Problem) -> str | None:
    """Say why K2 for more tokens cannot run a problem with any tiles, or None if it can."""
    if p.capability < (9, 0):
        return f"compute capability {p.capability[0]}.{p.capability[1]} has no tensor memory accelerator; 9.0 has"
    if p.compute != "w8a8":
        return f"it multiplies codes by codes, not {p.compute}"
    if p.layout == "block":
        return "it has no 128x128 scales"
    if p.dtype == torch.float32:
        return "float32 activations have no tensor cores to use"
    return f"inputs come in multiples of 16, not {p.k}" if p.k % 16 else None


def unsupported(capability: tuple[int, int]) -> str | None:
    """Say why a GPU cannot run the Triton kernels at all, or None if it can."""
    major, minor = capability
    if capability < (8, 9):
        return f"compute capability {major}.{minor} has no FP8 tensor cores; 8.9 or later has"
    if capability in SHARED_BYTES:
        return None
    built = ", ".join(f"{first}.{second}" for first, second in SHARED_BYTES)
    return f"compute capability {major}.{minor} is not one the kernels are built for: {built}"


def vendor_refusal(problem: Problem) -> str | None:
    """Say why ``torch._scaled_mm`` cannot be the hybrid path's GEMM, or None if it can."""
    if problem.compute != "w8a8":
        return "it multiplies codes by codes, not w8a16"
    if problem.layout == "block" and problem.capability != (9, 0):
        return f"its block-scaled form needs Hopper (9.0), not {problem.capability[0]}.{problem.capability[1]}"
    if problem.layout == "block" and (problem.n % BLOCK or problem.k % (4 * BLOCK)):
        widths = (("outputs", problem.n, BLOCK), ("inputs", problem.k, 4 * BLOCK))
        wrong = [f"{name} in multiples of {step}, not {width}" for name, width, step in widths if width % step]
        return f"its block-scaled form needs {' and '.join(wrong)}"
    if problem.dtype != torch.bfloat16:
        return "its row-wise form writes bf16 only"
    if problem.n % 16 or problem.k % 16:
        return f"it needs widths that are multiples of 16, not {problem.k} and {problem.n}"
    return unsupported(problem.capability)


def _rank_block(p: Problem, most: int) -> int:
    return min(next_power_of_2(max(p.rank, 16)), most)


def _roomy(p: Problem) -> bool:
    return SHARED_BYTES.get(p.capability, 0) > 128 << 10


def _gemm(p: Problem) -> Gemm:
    roomy = _roomy(p)
    wide_x, blocks = p.compute == "w8a16", p.layout == "block"
    if p.dtype == torch.float32:  # exact multiplications on the scalar units: correct, never fast
        return Gemm(16, 64, BLOCK if blocks else 64, 16, 4, 2)
    if p.k % 16:  # rows that are not 16-byte aligned load byte by byte, without the asynchronous copies
        return Gemm(16 if p.m <= 16 else 32, 64, BLOCK if blocks else 64, 16, 4, 2)
    block_m = next((size for size in (16, 32, 64) if p.m <= size), 128)
    block_r = _rank_block(p, 64 if block_m == 16 else 32)
    if block_m < 64:
        deep = p.k >= 1024 and roomy and not wide_x and not blocks
        stages = (5 if roomy else 4) if not wide_x else (4 if roomy else 3)
        return Gemm(block_m, 64, 256 if deep else BLOCK, block_r, 4, stages)
    if wide_x:
        return Gemm(
            64 if blocks else block_m,
            block_m,
            BLOCK if blocks else 64,
            block_r,
            4 if block_m == 64 else 8,
            3 if roomy else 2,
        )
    if block_m == 64:
        return Gemm(64, 64, BLOCK, block_r, 4, 4)
    if blocks:  # the scaled sum of each 128-block is an accumulator of its own: half the tile, or it spills
        return Gemm(64, 128, BLOCK, block_r, 4, 3)
    return Gemm(128, 128, BLOCK, block_r, 8, 4 if roomy else 2)


def _tma(p: Problem) -> Tma | None:
    blocks = cdiv(p.m, 64) * cdiv(p.n, 128)
    # one block a multiprocessor keeps more in flight than two
    stages = (6 if blocks <= MULTIPROCESSORS else 4) if _roomy(p) else 3
    # rows of B that are not 16-byte aligned have an address a value, which few ranks at once keep in registers
    tiles = Tma(64, 128, BLOCK, _rank_block(p, 16 if p.rank % 8 else 64), 4, stages, 3)
    return tiles if p.m > DECODE_MAX_TOKENS and refusal(tiles, p) is None else None


def _rows_a_group(p: Problem) -> int:
    return p.m // max(1, min(p.groups - 1, p.m))


def _power_of_two(value: int, most: int) -> int:
    """Largest power of two that is at most ``value`` and ``most``, and at least 1."""
    return 1 << (max(1, min(value, most)).bit_length() - 1)


def _shrink(p: Problem) -> Shrink:
    if p.dtype == torch.float32 or p.k % 16:
        return Shrink(16, _rank_block(p, 32), 64, 1, 4, 2)
    rows = _rows_a_group(p)
    block_m = 16 if p.m <= 64 or rows <= 16 else 32 if rows <= 32 else 64
    tiles = max(cdiv(p.m, block_m), min(p.groups - 1, p.m)) * p.slices
    block_r = _rank_block(p, 32 if tiles <= 16 else 64)
    tiles *= cdiv(max(p.rank, 1), block_r)
    # as many blocks as the GPU holds at once, each with at least 256 inputs to add
    room = MULTIPROCESSORS * (1 if block_m == 64 else 2)
    split = _power_of_two(room // tiles, min(8, p.k // 256))
    deep = p.m > DECODE_MAX_TOKENS and block_m + block_r < 128 and p.k >= 1024 and _roomy(p)
    return Shrink(block_m, block_r, 256 if deep else BLOCK, split, 4, 3 if deep else 4 if _roomy(p) else 2)


def _expand(p: Problem) -> Expand:
    if p.dtype == torch.float32:
        return Expand(16, 64, 32, 1, 4, 1)
    rows = _rows_a_group(p)
    block_m = 16 if rows <= 16 or p.rank % 8 else 32 if rows <= 32 else 64
    block_n = 128 if block_m == 32 else 64
    tiles = max(cdiv(p.m, block_m), min(p.groups - 1, p.m)) * cdiv(p.n, block_n)
    return Expand(block_m, block_n, _rank_block(p, 64), _power_of_two(tiles // (2 * MULTIPROCESSORS), 8), 4, 3)


def terms(compute: str, dtype: torch.dtype) -> int:
    """Codes that the decode kernel multiplies for each activation: under w8a16 as many as hold it exactly."""
    return 1 if compute == "w8a8" else 2 if dtype == torch.bfloat16 else 3


def _columns(p: Problem) -> int:
    """Columns of the decode kernel's GEMM a token takes: its terms, to a power of two."""
    return next_power_of_2(terms(p.compute, p.dtype))


def _decode_tokens(p: Problem) -> int:
    """Tokens that the decode kernel's one tile holds."""
    return DECODE_MAX_TOKENS // _columns(p)


def _decode(p: Problem) -> Decode:
    block_m = next((size for size in (16, 32) if p.m <= size), 64)
    programs, adapters, long = cdiv(p.n, 64), min(p.groups - 1, p.m), p.k > 8192
    one_wave, many, large = programs <= MULTIPROCESSORS, adapters > 1, p.m > 32
    # a block with a multiprocessor to itself keeps much in flight; several hide each other's ends
    if one_wave and (programs <= MULTIPROCESSORS // 2 if many else long):
        blocks = 2 if many and not large and (not long or block_m == 32) else 1
    elif large:
        blocks = 2 if many else 1 if one_wave else 3
    else:
        blocks = 2 if one_wave and not (many and programs > 80) else 3
    wide = one_wave if large else blocks < 3 or (_columns(p) == 1 and (p.m <= 16) != one_wave)
    # Triton 3.7 cannot compile w8a16's narrower steps for sm_100
    wide = wide or (_columns(p) > 1 and p.capability[0] == 10)
    block_k = 2 * BLOCK if wide and p.layout != "block" and _roomy(p) else BLOCK
    stage = (64 + block_m * _columns(p)) * block_k
    limit, rest = SHARED_BYTES.get(p.capability, 0), (2 << 10) if many else (12 << 10)
    beside = _rank_block(p, DECODE_MAX_RANK) * (64 + block_m) * _size(p.dtype)
    most = 5 if large and one_wave and not long else 6 if many and blocks == 1 else 8
    stages = max(2, min(most, (limit // blocks - rest) // stage, (limit - beside) // (stage + 4 * (64 + block_m))))
    tiles = max(adapters, 1) * p.slices * cdiv(max(p.rank, 1), 64)
    split = 8 if long else 4
    if many:
        share = (160 if one_wave else 256) // (2 if large else 1)
        split = max(1 if large else 2, _power_of_two(share // tiles, 4 if one_wave else 8))
    split = min(split, _power_of_two(p.k // 256, 8))
    part = 8192 if long and (many or large) else 4096 if large else 2048 if p.m > 16 else 1024
    if one_wave and not many and not large:  # quantizer, shrink and GEMM at once on the GPU, where they can
        room = MULTIPROCESSORS - programs - tiles * split
        part = next((size for size in (1024, 2048) if p.m * cdiv(p.k, size) <= room), 4096)
    odd = many and p.m > 16 and p.rank > 64 and p.rank % 16 != 0  # rows of B that are cut short take registers too
    whole = large and not many  # one adapter's A is read once, not once for each 16 rows
    # measured: in long projections of 1 and of 17 to 32 tokens the next call's blocks are in this one's way
    overlap = one_wave and not (long and (p.m == 1 or 16 < p.m <= 32)) if p.rank else not large
    return Decode(
        block_m, 64, block_k, stages, part=part, shrink_m=64 if whole else 16 if many else block_m,
        shrink_r=_rank_block(p, 64), shrink_k=64 if whole else BLOCK,
        shrink_stages=3 if not _roomy(p) or (blocks == 3 and not many) else 4, split_k=split,
        together=2 if p.rank <= 64 and not large else 1,  # more would spill registers
        b_stages=4 if one_wave or p.m > 16 else 3,
        ahead=1024 if one_wave and 1024 <= p.k <= 8192 else 512 if long and p.m <= 16 else 0, early=2,
        overlap=overlap and not many,
        # or 64 columns spill registers; where four warps hold many adapters, eight take 1.1 to 1.6 times as long
        num_warps=8 if (large and (many or p.rank > 64 or p.layout == "block")) or odd else 4,
    )  # fmt: skip


def bucketed(problem: Problem) -> Problem:
    """Make the problem whose plan it shares: that of the next power of two of tokens."""
    bucket = next_power_of_2(max(problem.m, 1))
    return problem if problem.m == bucket else replace(problem, m=bucket)


def bare(problem: Problem) -> Problem:
    """Make the problem of the base alone."""
    return replace(problem, rank=0, slices=1, groups=1)


def through(problem: Problem, path: str, base: str, reason: str = "") -> Plan:
    """Make the plan of a path and a base with the rules' tiles, whether or not they can run the problem."""
    problem = bucketed(problem)
    expand, decode = _expand(problem), _decode(problem)
    if base == "decode":
        expand, decode = replace(expand, early=True), _decode(bare(problem))
    return Plan(path, reason, base, _gemm(problem), _tma(problem), _shrink(problem), expand, decode)


@lru_cache(maxsize=4096)
def _plan(problem: Problem) -> Plan:
    missing = unsupported(problem.capability)
    if missing:
        return through(problem, "reference", "none", missing)
    refused = vendor_refusal(problem)
    adapters = min(problem.groups - 1, problem.m)
    if refusal(_decode(problem), problem) is None:
        if problem.rank and problem.m > MANY_MIN_TOKENS and adapters >= MANY_MIN_ADAPTERS:
            reason = f"over {MANY_MIN_TOKENS} tokens of at least {MANY_MIN_ADAPTERS} adapters: a kernel of its own adds"
            return through(problem, "hybrid", "decode", reason)
        reason = f"at most {_decode_tokens(problem)} tokens: one kernel in which quantizer, shrink and GEMM overlap"
        return through(problem, "decode", "own", reason)
    if problem.m <= FUSED_MAX_TOKENS and adapters <= FUSED_MAX_ADAPTERS:
        reason = f"at most {FUSED_MAX_TOKENS} tokens and {FUSED_MAX_ADAPTERS} adapters: cheapest in the GEMM's epilogue"
        return through(problem, "fused", "own", reason)
    tma = _tma(problem)
    if tma and (refused or cdiv(problem.m, tma.block_m) * cdiv(problem.n, tma.block_n) <= TMA_MAX_BLOCKS):
        reason = refused or f"its GEMM has at most {TMA_MAX_BLOCKS} blocks, where the library's is the faster"
        return through(problem, "fused", "tma", f"cheapest in the library's GEMM's epilogue: {reason}")
    base = "own" if refused or problem.m <= OWN_MAX_TOKENS else "vendor"
    if refused:
        reason = f"adapter kernels after the library's own GEMM, since the vendor's cannot be used: {refused}"
    else:
        reason = f"adapter kernels after the GEMM; of GEMMs, the {base} one is the faster at these token counts"
    return through(problem, "hybrid", base, reason)


def make_plan(problem: Problem) -> Plan:
    """Choose the path and the tiles of a problem.

    Token counts share a plan within a bucket (a power of two), so that a plan is looked up, not made, at each call.
    On the CPU there is nothing to plan: every operator is its plain-torch reference.

    Parameters
    ----------
    problem : Problem
        ``problem.m`` may be any token count.

    Returns
    -------
    Plan
        With ``path`` "decode", "fused", "hybrid" or "reference" and the reason in words.
    """
    return _plan(bucketed(problem))
