"""More tokens or adapters than a decode batch: kernels that run beside each other read and write what they should."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cases import Case, make_case, oracle, sqnr
from tests.gpu.paths import HAS_DECODE
from tests.gpu.test_decode import bits, capture, chain, layers
from torch_epilora.ops.dispatch import plan_of

pytestmark = pytest.mark.skipif(not HAS_DECODE, reason="dependent launches need compute capability 9.0 or later")
BATCHES = [(64, 32), (100, 1), (256, 8), (300, 32), (1000, 3)]
PATHS = ["lora_linear", "lora_linear_fused", "lora_linear_hybrid"]


def launch(case: Case, path: str, *, pdl: bool) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_epilora.ops.triton.pdl.pdl_works", lambda device: pdl)
        return case.run(path)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("m", "slots"), BATCHES)
@pytest.mark.parametrize(("codes", "layout"), [("made", "channel"), ("static", "tensor"), ("given", "channel"),
                                               ("made", "block")])  # fmt: skip
def test_bits_do_not_depend_on_dependent_launches(path: str, m: int, slots: int, codes: str, layout: str) -> None:
    case = make_case(m, 4096, [256, 128], 24, slots, codes=codes, layout=layout, b_bias=True, device="cuda")
    want = launch(case, path, pdl=False)
    assert sqnr(want, oracle(case)) > 40
    for _ in range(20):
        assert torch.equal(bits(launch(case, path, pdl=True)), bits(want))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("m", "slots"), BATCHES)
def test_a_chain_of_layers_reads_what_the_layer_before_wrote(path: str, m: int, slots: int) -> None:
    """Memory that one layer has let go of is the next one's, whose kernels start early."""
    cases = layers(m, 8, slots)
    for i in range(30):
        x = torch.randn_like(cases[0].x)
        want = chain(cases, x, lambda case: launch(case, path, pdl=False))
        got = chain(cases, x, lambda case: launch(case, path, pdl=True))
        assert torch.isfinite(want).all() and torch.equal(bits(got), bits(want)), i


def test_a_chain_in_which_no_row_has_an_adapter_waits_all_the_same() -> None:
    """Programs of the expand that have nothing to add end after the GEMM too, or the next layer would start early."""
    unknown = torch.tensor([False])  # what a graph that was captured with adapters says
    cases = [
        replace(case, groups=case.groups._replace(no_adapter=unknown)) for case in layers(64, 8, 32, popularity="none")
    ]
    assert plan_of(*cases[0].args()).base == "decode"
    for i in range(50):
        x = torch.randn_like(cases[0].x)
        want = chain(cases, x, lambda case: launch(case, "lora_linear", pdl=False))
        got = chain(cases, x, lambda case: launch(case, "lora_linear", pdl=True))
        assert torch.isfinite(want).all() and torch.equal(bits(got), bits(want)), i


@pytest.mark.parametrize(("m", "slots"), BATCHES)
def test_a_graph_of_layers_replays_to_the_same_bits(m: int, slots: int) -> None:
    cases = layers(m, 4, slots)
    x = torch.randn_like(cases[0].x)
    graph, y = capture(lambda: chain(cases, x, lambda case: case.run("lora_linear")))
    for i in range(200):
        x.normal_()
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(bits(y), bits(chain(cases, x, lambda case: case.run("lora_linear")))), i


@pytest.mark.parametrize("path", PATHS)
def test_threads_that_share_a_stream_do_not_meet_in_memory_or_counters(path: str) -> None:
    """Kernels that start early find between them and what they were launched after the calls of other threads."""
    models = [layers(m, 6, slots) for m, slots in ((64, 32), (64, 20), (256, 8), (16, 4))]
    inputs = [torch.randn_like(cases[0].x) for cases in models]
    wants = [
        chain(cases, x, lambda case: launch(case, path, pdl=False)) for cases, x in zip(models, inputs, strict=True)
    ]

    def work(number: int) -> bool:
        got = [chain(models[number], inputs[number], lambda case: case.run(path)) for _ in range(100)]
        return all(torch.equal(bits(y), bits(wants[number])) for y in got)

    with ThreadPoolExecutor(len(models)) as pool:
        assert all(pool.map(work, range(len(models))))


def test_a_thousand_runs_give_the_same_bits() -> None:
    for m, slots in BATCHES:
        case = make_case(m, 1024, [512, 256], 64, slots, device="cuda")
        want = case.run()
        assert all(torch.equal(bits(case.run()), bits(want)) for _ in range(1000)), (m, slots)


def test_a_weight_that_starts_off_16_bytes_takes_another_gemm() -> None:
    case = make_case(256, 512, [256], 16, 2, device="cuda")
    assert plan_of(*case.args()).base == "tma"
    room = torch.empty(case.weight.numel() + 8, dtype=torch.uint8, device="cuda").view(case.weight.dtype)
    off = room[8:].view(case.weight.shape)
    off.copy_(case.weight)
    case.weight = off
    for path in PATHS:
        assert sqnr(case.run(path), oracle(case)) > 40
