"""What the pages promise about the project's own files."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_readme_links_and_commands_exist():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#:]+)\)", readme):
        assert (ROOT / target).exists(), target
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", readme)) <= targets


def test_readme_names_the_transformers_needs_of_a_saved_checkpoint():
    least = re.search(r'"compressed-tensors>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
    for page in ("README.md", "docs/formats.md"):
        assert f"compressed-tensors>={least}" in (ROOT / page).read_text(encoding="utf-8"), page
    transformers = pytest.importorskip("transformers.utils.import_utils")
    assert transformers.COMPRESSED_TENSORS_MIN_VERSION.startswith(least)


def test_no_page_claims_a_speed_without_its_figures():
    if any((ROOT / "benchmarks/results").glob("**/*.json")):
        return
    claim = re.compile(r"\d(?:\.\d+)?\s?(?:x faster|times faster|µs|us\b|ms\b|tokens/s|TFLOP)", re.IGNORECASE)
    for page in PAGES:
        assert not claim.search(page.read_text(encoding="utf-8")), page.name


def test_continuous_integration_calls_the_readmes_test_command():
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert "set -euo pipefail" in script
    assert re.findall(r"^step (make \S+)$", script, re.MULTILINE) == ["make test", "make test-vllm"]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_sanitize_says_what_it_lacks(tmp_path):
    run = subprocess.run(
        [shutil.which("make"), "sanitize"], cwd=ROOT, env={"PATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert run.returncode != 0
    assert "make sanitize: compute-sanitizer is not on PATH" in run.stderr


def test_constraints_pin_every_package_exactly():
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), lines
    names = {line.split("==")[0].lower() for line in lines}
    assert {"torch", "triton", "transformers", "peft", "numpy", "safetensors", "packaging"} <= names
