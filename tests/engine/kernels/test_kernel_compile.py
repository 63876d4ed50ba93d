"""The kernels as a GPU would get them: compiled for it here, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed: pip install 'homing[kernels]'")

# Compilers are slow where others compute.
pytestmark = pytest.mark.timeout(400)

# A process of its own: in this one the kernels are the interpreter's.
_COMPILE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from engine_shim.attention import kernels
from engine_shim.attention.kernel_attention import _tiles

INTEGERS = {"pages", "starts", "query_starts", "lengths", "extends", "decodes"}
FLOATS = {"peaks", "totals", "mixes"}
POINTERS = {"out", "query"}
POOLS = {"keys", "values"}

def compiled(kernel, type_, head_dim, capability, packed):
    tiles = _tiles(head_dim, 4)
    constants = {
        "REPEATS": 4, "HEAD_DIM": head_dim, "HEAD_STRIDE": head_dim + 4 * packed,
        "DIM": triton.next_power_of_2(head_dim), "PAGE_TOKENS": 16,
        "ROWS": tiles.rows if kernel is kernels.extend_kernel else 16, "KEYS": tiles.keys, "SPLITS": 16,
    }
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INTEGERS:
            signature[name] = "*i32"
        elif name in FLOATS:
            signature[name] = "*fp32"
        elif name in POINTERS:
            signature[name] = "*" + type_
        elif name in POOLS:
            signature[name] = "*u8" if packed else "*" + type_
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    # A scalar that Triton specialises on would compile anew as it becomes 1, or divisible by 16.
    specialised = [each.name for each in kernel.params if signature[each.name] == "i32" and not each.do_not_specialize]
    constants = {name: value for name, value in constants.items() if name in signature}
    source = ASTSource(kernel, signature, constexprs=constants)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    wide = "mul.lo.s64" in done.asm["ptx"] or "mad.lo.s64" in done.asm["ptx"]
    return {"kernel": kernel.__name__, "specialised": specialised, "shared": done.metadata.shared,
            "cubin": len(done.asm["cubin"]), "wide": wide}

type_, head_dim, capability, packed = sys.argv[1], *map(int, sys.argv[2:])
print(json.dumps([compiled(kernel, type_, head_dim, capability, packed)
                  for kernel in (kernels.extend_kernel, kernels.decode_kernel, kernels.join_kernel)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_", "head_dim", "capability", "packed", "shared_limit"),
    [
        ("bf16", 128, 90, 0, 227 << 10),
        ("bf16", 256, 80, 0, 163 << 10),
        ("fp16", 80, 80, 0, 163 << 10),
        ("fp32", 256, 90, 0, 227 << 10),
        ("bf16", 128, 90, 1, 227 << 10),
        ("fp16", 128, 80, 1, 163 << 10),
    ],
)
def test_compiles_without_a_gpu(
    type_: str, head_dim: int, capability: int, packed: int, shared_limit: int, tmp_path: Path
) -> None:
    """Down to machine code, with 64-bit products in it, for any length, in as much shared memory as there is.

    ``packed``: over keys and values of eight bits.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, type_, str(head_dim), str(capability), str(packed)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = {each["kernel"]: each for each in json.loads(done.stdout)}
    assert set(kernels) == {"extend_kernel", "decode_kernel", "join_kernel"}
    for kernel in kernels.values():
        assert kernel["cubin"] > 1000
        assert kernel["specialised"] == []
        assert kernel["shared"] <= shared_limit
    assert kernels["extend_kernel"]["wide"]
    assert kernels["decode_kernel"]["wide"]
