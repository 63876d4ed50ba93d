"""The GGUF reader against files that the ``gguf`` package wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize

from engine_shim.model.config import UnsupportedModelError
from engine_shim.model.gguf_file import read_gguf_file
from engine_shim.model.weights import read_gguf_tensors

METADATA: dict[str, object] = {
    "general.architecture": "llama",
    "a.small": 3,
    "a.large": 2**40,
    "a.float": 0.5,
    "a.yes": True,
    "a.list": [1, -2, 3],
    "a.texts": ["ein", "zwei", "Ġdrei", ""],
}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A file with metadata of every sort and a plain and a quantised tensor, and the tensors' values."""
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_uint8("a.small", 3)
    writer.add_uint64("a.large", 2**40)
    writer.add_float32("a.float", 0.5)
    writer.add_bool("a.yes", True)
    writer.add_array("a.list", [1, -2, 3])
    writer.add_array("a.texts", ["ein", "zwei", "Ġdrei", ""])
    random = np.random.default_rng(0)
    plain = random.standard_normal((3, 5)).astype(np.float32)
    blocks = quantize(random.standard_normal((4, 64)).astype(np.float32), GGMLQuantizationType.Q4_1)
    writer.add_tensor("output_norm.weight", plain)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path / "model.gguf", {
        "model.norm.weight": plain,
        "model.embed_tokens.weight": dequantize(blocks, GGMLQuantizationType.Q4_1),
    }


def test_what_the_package_writes_is_read(written: tuple[Path, dict[str, np.ndarray]]) -> None:
    """Metadata of every type, shapes outermost first, and the tensors' own values."""
    path, values = written
    file = read_gguf_file(path)
    assert file.metadata == METADATA
    assert {tensor.name: tensor.shape for tensor in file.tensors} == {
        "output_norm.weight": (3, 5),
        "token_embd.weight": (4, 64),
    }
    tensors = read_gguf_tensors(path)
    assert set(tensors) == set(values)
    for name, value in values.items():
        np.testing.assert_array_equal(tensors[name].numpy(), value)


@pytest.mark.parametrize("length", [30, 100])
def test_a_cut_file_is_refused(written: tuple[Path, dict[str, np.ndarray]], length: int) -> None:
    """A download that ended early says so."""
    path, _ = written
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(UnsupportedModelError, match="ends in the middle"):
        read_gguf_file(path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    """A file of another format is named as such."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(UnsupportedModelError, match="not a GGUF file"):
        read_gguf_file(path)
