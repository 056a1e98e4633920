"""Facts about the machine, with and without what they are about."""

import subprocess
import types

import pytest
import torch

from torch_epilora.cli import machine


def test_versions_name_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(machine, "LIBRARIES", ("torch", "no-such-library"))
    found = machine.versions()
    assert found["no-such-library"] == "not installed"
    assert found["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("hip", "built", "available", "reason"),
    [
        ("6.0", True, True, "is built for ROCm"),
        (None, False, False, "is built without CUDA"),
        (None, True, False, "finds no device; see nvidia-smi and CUDA_VISIBLE_DEVICES"),
        (None, True, True, None),
    ],
)
def test_why_no_gpu(monkeypatch, hip, built, available, reason):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    found = machine.why_no_gpu()
    assert found is None if reason is None else reason in found


def test_gpus_are_described(monkeypatch):
    properties = types.SimpleNamespace(name="X1", major=12, minor=0, multi_processor_count=7, total_memory=2**30)
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert machine.gpus()[1] == machine.Gpu(1, "X1", 120, 7, 2**30)
    assert machine.gpus()[1].device == "cuda:1"


def test_no_gpus_without_cuda(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "none")
    assert machine.gpus() == []


def test_driver_version(monkeypatch):
    done = types.SimpleNamespace(stdout="580.95.05\n580.95.05\n")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert machine.driver_version() == "580.95.05"
    done.stdout = ""
    assert machine.driver_version() == "not known (nvidia-smi names no GPU)"


def test_driver_version_without_nvidia_smi(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert machine.driver_version() == "not known (FileNotFoundError from nvidia-smi)"
