"""The commands of `epilora` and their options."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_epilora import __version__

__all__ = ["app"]

app = typer.Typer(
    name="epilora",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Layout(StrEnum):
    """How many weights share a scale."""

    tensor = "tensor"
    channel = "channel"
    block = "block"


class Compute(StrEnum):
    """What the base GEMM multiplies the weight codes by."""

    w8a8 = "w8a8"
    w8a16 = "w8a16"


class Base(StrEnum):
    """What an adapter is trained on: FP8 weights under 16-bit or FP8 activations, or the model as it is."""

    w8a16 = "w8a16"
    w8a8 = "w8a8"
    bf16 = "bf16"


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"torch-epilora {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Many LoRA adapters together with a low-precision base model."""


def _fail(message: str) -> typer.Exit:
    """Print a message on stderr; the caller raises what comes back."""
    Console(stderr=True).print(f"epilora: {message}", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(1)


def _lacks(error: ModuleNotFoundError, command: str) -> typer.Exit:
    """Say which library a command lacks; a module of our own that is missing is a fault, and raised."""
    if error.name is None or error.name.startswith("torch_epilora"):
        raise error
    return _fail(
        f"{error.name} is not installed; {command} needs the extra demo: "
        "run `make demo`, or `pip install '.[demo]'` in the checkout"
    )


@app.command()
def demo(
    adapters: Annotated[
        Path | None,
        typer.Option(help="Folder of the three adapters; by default the shipped ones.", exists=True, file_okay=False),
    ] = None,
) -> None:
    """Answer one batch with three adapters and the bare base, on a real model, and check every projection."""
    try:
        from torch_epilora.cli.demo import run_demo

        # gguf is not imported before the model is read
        run_demo(adapters_folder=adapters)
    except ModuleNotFoundError as error:
        raise _lacks(error, "the demo") from None


@app.command()
def finetune(
    out: Annotated[Path, typer.Option(help="Folder to write the adapter to.", file_okay=False)],
    base: Annotated[
        Base, typer.Option(help="FP8 weights under 16-bit or FP8 activations, or the model as it is.")
    ] = Base.w8a16,
    steps: Annotated[int, typer.Option(help="Optimizer steps.", min=1)] = 200,
    batch: Annotated[int, typer.Option(help="Examples in a step.", min=1)] = 8,
    rank: Annotated[int, typer.Option(help="Rank of the adapter.", min=1, max=4096)] = 16,
    lr: Annotated[float, typer.Option(help="The highest learning rate.", min=0.0)] = 5e-4,
    seed: Annotated[
        int, typer.Option(help="Of the adapter's first values and the order of the examples.", min=0, max=2**63 - 1)
    ] = 0,
    model: Annotated[
        Path | None,
        typer.Option(help="A causal LM's folder; by default the demo's model.", exists=True, file_okay=False),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="JSONL of prompt and completion, or of messages; by default generated word problems.",
            exists=True, dir_okay=False,
        ),
    ] = None,
) -> None:  # fmt: skip
    """Train a LoRA adapter on an FP8 base with PEFT, save it, and serve it beside the bare base in one batch."""
    try:
        from torch_epilora.cli.finetune import run_finetune

        run_finetune(
            Console(), out, base=base.value, steps=steps, batch=batch, rank=rank, lr=lr, seed=seed,
            model_folder=model, data=data,
        )  # fmt: skip
    except ModuleNotFoundError as error:
        raise _lacks(error, "finetune") from None
    except (ValueError, OSError, NotImplementedError) as error:
        raise _fail(str(error)) from None


@app.command()
def doctor(
    model_dir: Annotated[
        Path | None,
        typer.Argument(help="A model's folder; only its config.json is read.", exists=True, file_okay=False),
    ] = None,
    arch: Annotated[
        int | None, typer.Option(help="Show the model's paths on this GPU, such as 90 for sm_90.", min=50, max=999)
    ] = None,
    layout: Annotated[
        Layout | None,
        typer.Option(
            help="How many weights share a scale; by default as in the checkpoint's quantization_config, else channel."
        ),
    ] = None,
    compute: Annotated[Compute, typer.Option(help="Quantize activations, or take them as they are.")] = Compute.w8a8,
    rank: Annotated[int, typer.Option(help="Rank that the adapter slots hold.", min=1, max=4096)] = 64,
    slots: Annotated[int, typer.Option(help="Adapter slots.", min=0, max=4096)] = 8,
) -> None:
    """Say what this machine can do, and which path each projection of a model takes and why."""
    from torch_epilora.cli.doctor import run_doctor

    if model_dir is None and arch is not None:
        raise typer.BadParameter("it chooses the GPU of a model's paths: give MODEL_DIR too", param_hint="--arch")
    try:
        run_doctor(
            Console(),
            model_dir,
            arch=arch,
            layout=None if layout is None else layout.value,
            compute=compute.value,
            rank=rank,
            slots=slots,
        )
    except ValueError as error:
        raise _fail(str(error)) from None


@app.command()
def bench(
    quick: Annotated[bool, typer.Option("--quick", help="A small table, in about two minutes.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Time the plain-torch reference on the CPU.")] = False,
    output: Annotated[Path | None, typer.Option("--json", help="Also write the figures here.", dir_okay=False)] = None,
) -> None:
    """Time our paths beside plain torch on the GPU present."""
    if not quick:
        raise typer.BadParameter("only the quick table is there so far: epilora bench --quick")
    from torch_epilora.cli.machine import why_no_gpu

    reason = None if cpu else why_no_gpu()
    if reason is not None:
        raise _fail(f"nothing to measure: {reason}. `epilora bench --quick --cpu` times the reference on the CPU.")
    if output is not None and not output.parent.is_dir():
        raise _fail(f"--json {output}: expected a file in an existing folder, got none at {output.parent}")
    from torch_epilora.cli.bench import run_bench

    if not run_bench(Console(), cpu=cpu, output=output):
        raise typer.Exit(1)


@app.command()
def tune(
    model_dir: Annotated[
        Path, typer.Argument(help="A model's folder; only its config.json is read.", exists=True, file_okay=False)
    ],
    layout: Annotated[
        Layout | None,
        typer.Option(help="How many weights share a scale; by default as in the checkpoint, else channel."),
    ] = None,
    compute: Annotated[Compute, typer.Option(help="Quantize activations, or take them as they are.")] = Compute.w8a8,
    rank: Annotated[int, typer.Option(help="Rank that the adapter slots hold.", min=1, max=4096)] = 64,
    adapters: Annotated[
        list[int] | None, typer.Option(help="Adapter slots; may be given several times. By default 8.", min=1, max=4096)
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of a batch; may be given several times. By default powers of two up to 2048.", min=1),
    ] = None,
    graph_tokens: Annotated[
        int,
        typer.Option(help="Batches up to here run in CUDA graphs; larger ones are timed with the host's time.", min=0),
    ] = 512,
    jobs: Annotated[int, typer.Option(help="Processes that search; they time in turns.", min=1)] = 8,
    output: Annotated[
        Path | None,
        typer.Option("--out", help="Add to this file, a table to ship, instead of the user's own.", dir_okay=False),
    ] = None,
) -> None:
    """Search the fastest launch configurations of a model's projections on the GPU present, and keep them."""
    from torch_epilora.cli.machine import why_no_gpu

    reason = why_no_gpu()
    if reason is not None:
        raise _fail(f"nothing to measure: {reason}. `epilora tune` times kernels on a CUDA GPU.")
    if output is not None and not output.parent.is_dir():
        raise _fail(f"--out {output}: expected a file in an existing folder, got none at {output.parent}")
    from torch_epilora.cli.tune import run_tune
    from torch_epilora.nn.tuning import TOKENS

    try:
        run_tune(
            Console(), model_dir, layout=None if layout is None else layout.value, compute=compute.value, rank=rank,
            adapters=adapters or [8], tokens=tokens or TOKENS, graph_tokens=graph_tokens, jobs=jobs, output=output,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError) as error:
        raise _fail(str(error)) from None
