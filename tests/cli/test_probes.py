"""Probes without a GPU: they compile for an architecture, and say why they do not run."""

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton")
from torch_epilora.cli import probes

_COMPILED = """
import json
from torch_epilora.cli import probes
found = {f"fp8 {arch}": probes.probe_fp8(arch) for arch in (80, 89, 90, 100, 120)}
found |= {f"pdl {arch}": probes.probe_pdl(arch) for arch in (89, 90, 100, 120)}
print(json.dumps({name: (probe.ok, probe.detail) for name, probe in found.items()}))
print(json.dumps(probes._compile_problem("pdl_consumer", {"y": "*fp32", "z": "*fp32"}, 89)))
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in (probes.DISABLE_PDL, probes.INTERPRET):
        monkeypatch.delenv(variable, raising=False)


def _python(code, **environment):
    # Triton decides whether it interprets when a kernel is decorated, so what compiles has a process of its own.
    left = {name: value for name, value in os.environ.items() if name not in (probes.DISABLE_PDL, probes.INTERPRET)}
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, env=left | environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.splitlines()


@pytest.fixture(scope="module")
def compiled():
    return [json.loads(line) for line in _python(_COMPILED)]


@pytest.mark.parametrize("arch", [89, 90, 100, 120])
def test_fp8_compiles_without_a_gpu(compiled, arch):
    assert compiled[0][f"fp8 {arch}"] == [None, "compiles; not run, no CUDA device"]


def test_fp8_needs_sm_89(compiled):
    assert compiled[0]["fp8 80"] == [False, "needs sm_89 or later"]


@pytest.mark.parametrize("arch", [90, 100, 120])
def test_pdl_compiles_without_a_gpu(compiled, arch):
    assert compiled[0][f"pdl {arch}"] == [None, "compiles; not run, no CUDA device"]


def test_pdl_needs_sm_90(compiled):
    assert compiled[0]["pdl 89"] == [False, "needs sm_90 or later"]


def test_what_the_compiler_says_is_the_reason(compiled):
    # griddepcontrol does not exist before sm_90; ptxas says so, and its dump of the file is kept off the screen.
    assert len(compiled) == 2
    assert "requires .target sm_90 or higher" in compiled[1]
    assert len(compiled[1]) < 250


@pytest.mark.parametrize(("value", "off"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_disable_pdl_is_honoured(monkeypatch, value, off):
    monkeypatch.setenv("EPILORA_DISABLE_PDL", value)
    monkeypatch.setattr(probes, "_compile_problem", lambda kernel, pointers, arch: None)
    probe = probes.probe_pdl(90)
    assert (probe.ok is False) == off
    assert (probe.detail == f"switched off by EPILORA_DISABLE_PDL={value}") == off


@pytest.mark.parametrize("probe", [probes.probe_fp8, probes.probe_pdl])
def test_interpreter_is_reported_not_probed(monkeypatch, probe):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = probe(90)
    assert found.ok is None
    assert found.detail == "not run: TRITON_INTERPRET=1 makes Triton interpret kernels"


def test_scaled_mm_is_not_run_without_a_gpu():
    assert probes.probe_scaled_mm(90).ok is None


def test_scaled_mm_values_are_compared(monkeypatch):
    assert probes.probe_scaled_mm(90, device="cpu").ok is True
    real = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *args, **kwargs: real(*args, **kwargs) + 1)
    broken = probes.probe_scaled_mm(90, device="cpu")
    assert broken.ok is False
    assert "values are wrong" in broken.detail


def test_a_probe_that_raises_gives_its_reason():
    def fails():
        raise RuntimeError("first line\nCUDA error: invalid resource handle\nmore")

    assert probes._attempt("x", fails) == probes.Probe("x", False, "RuntimeError: CUDA error: invalid resource handle")


_INTERPRETED = """
import torch
from torch_epilora.cli import probe_kernels
a = torch.randint(-8, 9, (64, 64)).float()
codes = a.to(torch.float8_e4m3fn)
out = torch.full((64, 64), float("nan"))
probe_kernels.fp8_dot[(1,)](codes, codes, out, SIZE=64)
print(torch.equal(out, a @ a.T))
"""


def test_fp8_kernel_computes_the_product_under_the_interpreter():
    assert _python(_INTERPRETED, TRITON_INTERPRET="1") == ["True"]
