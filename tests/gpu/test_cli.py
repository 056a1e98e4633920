"""`epilora doctor` and `epilora bench --quick` on the GPU present."""

import json

import pytest
import torch

pytest.importorskip("typer")
from typer.testing import CliRunner

from torch_epilora.cli import bench, probes
from torch_epilora.cli.bench_cases import Case
from torch_epilora.cli.commands import app

MAJOR, MINOR = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
ARCH = 10 * MAJOR + MINOR


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for variable in (probes.DISABLE_PDL, probes.INTERPRET):
        monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("probe", "since"), [(probes.probe_fp8, 89), (probes.probe_scaled_mm, 89), (probes.probe_pdl, 90)]
)
def test_probe_really_runs(probe, since):
    found = probe(ARCH, device="cuda:0")
    assert found.ok == (ARCH >= since), found
    if ARCH >= since:
        assert found.detail == "compiles, runs, values exact"


def test_doctor_names_the_gpu():
    result = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"}).invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert torch.cuda.get_device_name() in result.output
    assert f"PDL (Triton, sm_{ARCH})" in result.output


@pytest.mark.skipif(ARCH < 90, reason="torch._scaled_mm takes row-wise scales from sm_90 on")
def test_bench_times_every_path(tmp_path, monkeypatch):
    cases = (Case("q+k", 512, (512, 256), 16, 4, 16), Case("down", 1024, (512,), 256, 8, 64))
    monkeypatch.setattr(bench, "GPU_CASES", cases)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "--quick", "--json", str(out)])
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["device"] == torch.cuda.get_device_name()
    always = {"torch", "fused", "hybrid", "dispatch"}
    for row, paths in zip(found["cases"], (always | {"decode"}, always), strict=True):
        assert set(row["us"]) == paths
        assert all(0 < us < 1e5 for us in row["us"].values())
        assert min(row["sqnr"].values()) > bench.LEAST_SQNR
