"""`epilora doctor`: what this machine can do, and which path each projection of a model takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torch_epilora.cli.machine import Gpu, driver_version, gpus, versions, why_no_gpu
from torch_epilora.cli.probes import Probe, probe_fp8, probe_pdl, probe_scaled_mm
from torch_epilora.ops import choice, tables
from torch_epilora.ops.plan import SHARED_BYTES
from torch_epilora.ops.switches import DISABLE_PDL, TUNE, disabled_by, tune_mode

__all__ = ["ARCHES", "run_doctor"]

# What the probes are compiled for where there is no GPU to ask.
ARCHES = tuple(10 * major + minor for major, minor in SHARED_BYTES)


def run_doctor(
    console: Console, folder: Path | None, *, arch: int | None, layout: str | None, compute: str, rank: int, slots: int
) -> None:
    """Print a model's paths, then versions, GPUs and what the probes found.

    Parameters
    ----------
    console : Console
        Where to print.
    folder : Path or None
        A model's folder; None leaves that part out.
    arch : int or None
        Show the model's paths on a GPU of this compute capability times ten; None is the first GPU here.
    layout : str or None
        Layout of the weight scales, "tensor", "channel" or "block"; None is the checkpoint's own, "channel" where its
        config names none.
    compute : str
        "w8a8" or "w8a16".
    rank : int
        Rank that the adapter slots hold.
    slots : int
        Adapter slots.

    Raises
    ------
    ValueError
        Where the folder has no readable config.json.
    """
    devices = gpus()
    if folder is not None:
        gpu = None
        if arch is None and devices:
            arch, gpu = devices[0].arch, devices[0].name
        _print_paths(console, folder, arch, layout=layout, compute=compute, rank=rank, slots=slots, gpu=gpu)
    console.print(_versions_table())
    console.print(_gpu_table(devices))
    off = disabled_by(DISABLE_PDL)
    console.print(f"{DISABLE_PDL}: {'set, PDL is switched off' if off else 'not set'}", highlight=False)
    for name in dict.fromkeys(gpu.name for gpu in devices):
        console.print(_tables_line(name), markup=False, highlight=False, soft_wrap=True)
    console.print(_probe_table(console, devices))


def _print_paths(console: Console, folder: Path, arch: int | None, *, layout: str | None, **options: Any) -> None:
    from torch_epilora.cli.paths import paths_table, print_reasons
    from torch_epilora.cli.projections import choose_layout

    layout, note = choose_layout(folder, layout)
    table, reasons = paths_table(folder, arch, layout=layout, **options)
    console.print(table)
    print_reasons(console, reasons)
    if note is not None:
        console.print(note, markup=False, highlight=False)
    if arch is None:
        console.print("--arch 90 shows the paths on a GPU of capability 9.0", highlight=False)
    console.print()


def _tables_line(gpu: str) -> str:
    """Say which tables of measured plans count on a GPU."""
    if tune_mode() == "off":
        return f"{TUNE}=off: {gpu} follows the rules' plans"
    try:
        paths = choice.shipped(gpu), choice.cached(gpu)
    except OSError as error:
        return f"measured plans of {gpu}: {error}"
    return f"measured plans of {gpu}: {' and '.join(f'{len(tables.read(path, gpu))} of {path}' for path in paths)}"


def _versions_table() -> Table:
    table = Table("library", "version", title="Versions")
    for name, version in versions().items():
        table.add_row(name, version)
    return table


def _gpu_table(devices: list[Gpu]) -> Table | str:
    if not devices:
        return f"GPU: none. {why_no_gpu()}. Every operator runs its plain-torch reference on the CPU."
    table = Table("GPU", "name", "capability", "SMs", "memory", title=f"GPUs (driver {driver_version()})")
    for gpu in devices:
        capability = f"{gpu.arch // 10}.{gpu.arch % 10}"
        table.add_row(str(gpu.index), gpu.name, capability, str(gpu.sms), f"{gpu.memory / 2**30:.0f} GiB")
    return table


def _probe_table(console: Console, devices: list[Gpu]) -> Table:
    how = "runs it and compares its values" if devices else "without a GPU to run it on"
    table = Table("probe", "", "found", title=f"Probes: each compiles a small kernel, {how}")
    targets: list[tuple[int, str | None]] = [(gpu.arch, gpu.device) for gpu in devices]
    targets = targets or [(arch, None) for arch in ARCHES]
    marks = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]-[/]"}
    for probe in _probes(console, targets):
        table.add_row(probe.name, marks[probe.ok], probe.detail)
    return table


def _probes(console: Console, targets: list[tuple[int, str | None]]) -> list[Probe]:
    with console.status("Compiling probes") as status:
        found = []
        for arch, device in targets:
            # PDL last: a launch that goes wrong can leave the device unusable for this process.
            for probe in (probe_fp8, probe_scaled_mm, probe_pdl):
                status.update(f"Compiling probes for sm_{arch}")
                if probe is not probe_scaled_mm or device is not None:
                    found.append(probe(arch, device=device))
    return found
