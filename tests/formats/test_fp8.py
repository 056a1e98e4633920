import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from torch_epilora.formats import LAYOUTS, Fp8Weight, canonical_scale


def spread(scale, n, k):
    """The scale of every element of a weight [n, k], by the definition of the canonical shapes."""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(n, k)
    if scale.shape == (n, 1):
        return scale.expand(n, k)
    return scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (128, 256), (200, 130), (300, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_is_within_half_a_code_and_keeps_the_largest(layout, shape, dtype):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    q = Fp8Weight.quantize(w, layout)
    assert q.layout == (layout if q.scale.numel() > 1 else "tensor")
    step = spread(q.scale, *shape)
    # e4m3 keeps 4 significant bits: half a code is 2^-4 of the value, and 2^-10 scales among the subnormals.
    error = (q.dequantize() - w.float()).abs()
    assert (error <= torch.maximum(w.float().abs() * 2**-4, step * 2**-10) * 1.0001).all()
    top = w.float().abs().argmax()
    assert torch.allclose(q.dequantize().flatten()[top], w.float().flatten()[top], rtol=1e-6)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 300), k=st.integers(1, 300), layout=st.sampled_from(LAYOUTS), turned=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_canonical_scale_undoes_how_it_was_stored(n, k, layout, turned, dtype, seed):
    blocks = (-(-n // 128), -(-k // 128))
    shape = {"tensor": (1, 1), "channel": (n, 1), "block": blocks}[layout]
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(dtype)
    # Where the transpose has the same shape, nothing tells it apart: it is read as it stands.
    stored = scale.t() if turned and shape[0] != shape[1] else scale
    found = canonical_scale(stored, (n, k), [layout])
    assert found.dtype == torch.float32 and found.is_contiguous()
    assert torch.equal(spread(found, n, k), spread(scale.float(), n, k))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_element_of_any_shape_is_per_tensor(shape):
    assert torch.equal(canonical_scale(torch.full(shape, 0.25), (7, 9)), torch.tensor([0.25]))


def test_the_config_decides_between_a_transposed_channel_and_a_block_scale():
    stored = torch.tensor([[2.0, 4.0]])
    assert torch.equal(canonical_scale(stored, (2, 256), ["channel"]), torch.tensor([[2.0], [4.0]]))
    assert torch.equal(canonical_scale(stored, (2, 256), ["block"]), stored)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_e8m0_exponents_are_powers_of_two(as_bytes):
    raw = torch.arange(255, dtype=torch.uint8).reshape(255, 1)
    stored = raw if as_bytes else raw.view(torch.float8_e8m0fnu)
    expected = torch.tensor([[2.0 ** (e - 127)] for e in range(255)], dtype=torch.float64).float()
    assert torch.equal(canonical_scale(stored, (255, 3), ["channel"]), expected)


@pytest.mark.parametrize("scale", [torch.tensor(2.0), torch.full((1, 1), 2.0), torch.full((1,), 2.0)])
def test_fp8_weight_reshapes_one_scale(scale, codes):
    w = Fp8Weight(codes(4, 6), scale, torch.tensor(0.5))
    assert w.scale.shape == (1,) and w.input_scale.shape == (1,) and w.layout == "tensor"
    assert torch.equal(w.dequantize(), codes(4, 6).float() * 2)


def test_fp8_weight_takes_views_and_vectors(codes):
    turned = codes(6, 4).t()
    w = Fp8Weight(turned, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert w.codes.is_contiguous() and w.scale.shape == (4, 1)
    assert torch.equal(w.dequantize(), turned.float() * torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    assert w.dequantize(torch.bfloat16).dtype == torch.bfloat16


def test_fp8_weight_is_frozen(codes):
    with pytest.raises(AttributeError):
        Fp8Weight(codes(2, 2), torch.ones(1)).scale = torch.ones(1)


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"codes": [[1]]}, TypeError, "codes: expected a tensor, got list"),
        ({"codes": torch.zeros(4, 6)}, TypeError, "codes: expected dtype float8_e4m3fn, got float32"),
        ({"codes": torch.zeros(4).to(torch.float8_e4m3fn)}, ValueError, r"codes: expected a matrix .* got shape \[4\]"),
        ({"codes": torch.zeros(0, 6).to(torch.float8_e4m3fn)}, ValueError, r"codes: .*not empty, got shape \[0, 6\]"),
        ({"scale": torch.ones(1).bfloat16()}, TypeError, "scale: expected dtype float32, got bfloat16"),
        ({"scale": torch.ones(3)}, ValueError, r"weight_scale: expected one element.*got shape \[3\]"),
        (
            {"scale": torch.tensor([float("nan")])},
            ValueError,
            "scale: expected values finite and not negative, got nan",
        ),
        ({"scale": torch.tensor([-1.0])}, ValueError, "scale: expected values finite and not negative, got -1.0"),
        ({"scale": torch.ones(1, device="meta")}, ValueError, "scale: expected it on cpu, where codes is, got meta"),
        ({"input_scale": 0.5}, TypeError, "input_scale: expected a tensor, got float"),
        ({"input_scale": torch.ones(2)}, ValueError, r"input_scale: expected one element, got shape \[2\]"),
        ({"input_scale": torch.zeros(1)}, ValueError, "input_scale: expected values finite and positive, got 0.0"),
        ({"input_scale": torch.ones(1, device="meta")}, ValueError, "input_scale: expected it on cpu"),
    ],
)
def test_fp8_weight_refuses(change, error, message, codes):
    parts = {"codes": codes(4, 6), "scale": torch.ones(1), **change}
    with pytest.raises(error, match=message):
        Fp8Weight(**parts)


def test_block_scales_have_no_static_input_scale(codes):
    with pytest.raises(ValueError, match="input_scale: expected None with a block scale"):
        Fp8Weight(codes(200, 130), torch.ones(2, 2), torch.ones(1))


def test_quantize_refuses():
    with pytest.raises(ValueError, match=r"layout: expected one of .*got 'row'"):
        Fp8Weight.quantize(torch.ones(2, 2), "row")
    with pytest.raises(ValueError, match="weight: expected finite values, got NaN or infinity"):
        Fp8Weight.quantize(torch.tensor([[1.0, float("inf")]]))
    with pytest.raises(ValueError, match="scale: expected float32, bfloat16, float16, float8_e8m0fnu or uint8"):
        canonical_scale(torch.ones(1, dtype=torch.float64), (2, 2))
