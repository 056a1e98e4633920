"""The projections of one decoder layer of the models that are measured, and of their tensor-parallel shards."""

Projections = dict[str, tuple[int, list[int]]]
"""By name: inputs, and the output widths of the slices that are computed as one."""


def decoder(hidden: int, intermediate: int, heads: int, kv_heads: int = 8, head: int = 128) -> Projections:
    """The four projections of a Llama-like layer: q, k and v as one, o, gate and up as one, down."""
    return {
        "qkv": (hidden, [heads * head, kv_heads * head, kv_heads * head]),
        "o": (heads * head, [hidden]),
        "gate_up": (hidden, [intermediate, intermediate]),
        "down": (intermediate, [hidden]),
    }


def shard(layer: Projections, parts: int) -> Projections:
    """One rank's projections out of ``parts``: qkv and gate_up split their outputs, o and down their inputs."""

    def part(name: str, width: int) -> int:
        if width % parts:
            raise ValueError(f"parts: {name} has a width of {width}, which {parts} ranks cannot share evenly")
        return width // parts

    return {
        name: (k, [part(name, width) for width in widths]) if name in ("qkv", "gate_up") else (part(name, k), widths)
        for name, (k, widths) in layer.items()
    }


MODELS: dict[str, Projections] = {
    "qwen3-8b": decoder(4096, 12288, 32),
    "llama-3.1-8b": decoder(4096, 14336, 32),
    "qwen3-0.6b": decoder(1024, 3072, 16),
    "qwen3-1.7b": decoder(2048, 6144, 16),
    "qwen2.5-72b": decoder(8192, 29568, 64),
}
MODELS |= {f"qwen3-8b-tp{parts}": shard(MODELS["qwen3-8b"], parts) for parts in (2, 4, 8)}
