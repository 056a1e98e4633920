"""Files that other tools wrote: JSON and safetensors inside one folder, nothing outside it, never pickle.

Every fault raises one ValueError that names the file (and the tensor, where one is at fault).
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# A checkpoint's index of a million tensors stays well below this; a larger file is not one of ours to parse.
MAX_JSON_BYTES = 256 * 2**20

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""What safetensors calls the dtypes of the tensors that a model's files hold."""


def open_folder(argument: str, path: str | os.PathLike[str]) -> Path:
    """Return ``path`` as an existing folder; ``argument`` names it in errors."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"{argument}: expected the path of a folder, got {type(path).__name__}.")
    folder = Path(path)
    # os.path's tests, unlike Path's, say no to a path that the system cannot hold.
    if not os.path.isdir(folder):
        raise ValueError(
            f"{argument}: expected an existing folder, got {cut(str(path))!r}. "
            "Nothing is downloaded: fetch the files first."
        )
    return folder


def member(folder: Path, name: object) -> Path:
    """Return the file called ``name`` in ``folder``; refuse a name or a link that leads out of it.

    A link into the ``blobs`` folder of the same Hugging Face cache entry is followed: that cache stores every file so.

    Raises
    ------
    ValueError
        If the name is not a bare file name, the file is missing, or a link leads elsewhere.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\\0"):
        raise ValueError(f"{folder}: expected the bare name of a file in this folder, got {name!r}.")
    file = folder / name
    if not os.path.isfile(file):
        raise ValueError(f"{folder / cut(name)}: expected a file, found none.")
    home, real = folder.resolve(), file.resolve()
    in_hub_cache = home.parent.name == "snapshots" and real.parent == home.parent.parent / "blobs"
    if not (real.is_relative_to(home) or in_hub_cache):
        raise ValueError(f"{file}: a link to {real}, outside the folder. Copy the file into the folder to read it.")
    return file


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read the JSON object in ``name``; a key given twice is an error, as its meaning would depend on the parser."""
    file = member(folder, name)
    size = file.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ValueError(f"{file}: expected at most {MAX_JSON_BYTES} bytes of JSON, got {size}.")
    try:
        value = json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror}).") from e
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{file}: expected JSON, got what does not parse ({e or type(e).__name__}).") from e
    if not isinstance(value, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(value).__name__}.")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} is given twice")
        found[key] = value
    return found


def read_safetensors(folder: Path, name: str, only: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Read tensors of one safetensors file to the CPU.

    Parameters
    ----------
    folder, name : Path, str
        Where it lies; see :func:`member`.
    only : iterable of str, optional
        The names that the file must hold, no more and no fewer; any names if None.

    Raises
    ------
    ValueError
        If the file is truncated, its header lies about sizes or types, or its names are not those expected.
    """
    file = member(folder, name)
    try:
        with file.open("rb") as f:
            pointer = f.read(20).startswith(b"version https://git")
    except OSError as e:
        raise ValueError(f"{file}: cannot be read ({e.strerror}).") from e
    if pointer:
        raise ValueError(f"{file}: a Git LFS pointer, not the tensors. Fetch the real file (git lfs pull).")
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            names = list(opened.keys())
            if only is not None and set(names) != set(only):
                _fail_names(file, set(names), set(only))
            return {key: opened.get_tensor(key) for key in names}
    except (SafetensorError, OSError, RuntimeError, KeyError, AttributeError) as e:
        raise ValueError(f"{file}: not a readable safetensors file ({e}). Fetch it again if it was cut short.") from e


def read_header(file: Path) -> dict[str, Tensor]:
    """Read names, shapes and dtypes of a safetensors file's tensors: each as one on the meta device.

    Raises
    ------
    ValueError
        If it is not a readable safetensors file.
    NotImplementedError
        If a tensor has a dtype that no format here uses.
    """
    found: dict[str, Tensor] = {}
    try:
        with safe_open(str(file), framework="pt", device="cpu") as opened:
            for key in opened.keys():
                part = opened.get_slice(key)
                if part.get_dtype() not in _DTYPES:
                    raise NotImplementedError(f"{file}: {key}: the dtype {part.get_dtype()} is not supported.")
                found[key] = torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{file}: not a readable safetensors file ({e}). Fetch it again if it was cut short.") from e
    return found


def _fail_names(file: Path, found: set[str], listed: set[str]) -> None:
    missing, extra = sorted(listed - found), sorted(found - listed)
    parts = [f"lacks {shorten(missing)}"] * bool(missing) + [f"also holds {shorten(extra)}"] * bool(extra)
    raise ValueError(f"{file}: expected the tensors that the index lists for it, but it {' and '.join(parts)}.")


def cut(name: str, most: int = 200) -> str:
    """Return a name for an error message: its beginning, if it is absurdly long."""
    return name if len(name) <= most else f"{name[:most]}... ({len(name)} characters)"


def shorten(names: Iterable[str], most: int = 4) -> str:
    """Join names for an error message, the first few in full."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
