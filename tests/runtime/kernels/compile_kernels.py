"""Compile each Triton kernel for two generations of GPUs, which needs no GPU, and print what was made, a line each."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autocastfx.runtime.kernels import cross_entropy, rms_norm

CAPABILITIES = (80, 90)  # A100, H100
FLOATS = ("fp16", "bf16", "fp32")


def compile_one(kernel: object, signature: dict[str, str], constants: dict[str, object], capability: int) -> None:
    given = {**signature, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=given, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})
    print(kernel.__name__, signature, capability, len(made.asm["cubin"]))  # type: ignore[attr-defined]


def main() -> None:
    for capability in CAPABILITIES:
        for low in FLOATS:
            compile_cross_entropy(f"*{low}", capability)
            compile_norm(f"*{low}", capability)


def compile_cross_entropy(scores: str, capability: int) -> None:
    rows = {"targets": "*i64", "logarithms": "*fp32", "ignored": "i32"}
    places = {"scores": scores, "row_stride": "i64", "column_stride": "i32"}
    constants = {"classes": 50257, "BLOCK": 4096}
    forward = {**places, **rows, "losses": "*fp32", "marks": "*fp32"}
    compile_one(cross_entropy._forward, _ordered(cross_entropy._forward, forward), constants, capability)
    backward = {**places, **rows, "gradients": "*fp32", "gradient_stride": "i32", "made": scores}
    compile_one(cross_entropy._backward, _ordered(cross_entropy._backward, backward), constants, capability)


def compile_norm(x: str, capability: int) -> None:
    for weight in ("*fp32", x):
        given = {"x": x, "weight": weight, "made": x, "rstds": "*fp32"}
        constants = {"width": 5000, "WEIGHTED": True, "BLOCK": 8192}
        forward = _ordered(rms_norm._forward, {**given, "eps": "fp32"})
        compile_one(rms_norm._forward, forward, constants, capability)
        backward = _ordered(rms_norm._backward, {**given, "gradients": x, "sums": "*fp32", "rows": "i32"})
        compile_one(rms_norm._backward, backward, {**constants, "SUMMED": True, "STEPS": 8}, capability)
        summed = {"sums": "*fp32", "made": weight, "programs": "i32"}
        sizes = {"width": 5000, "PROGRAMS": 512, "ROWS": 32, "COLUMNS": 128}
        compile_one(rms_norm._add_up, summed, sizes, capability)


def _ordered(kernel: object, signature: dict[str, str]) -> dict[str, str]:
    names: list[str] = kernel.arg_names  # type: ignore[attr-defined]
    return {name: signature[name] for name in names if name in signature}


if __name__ == "__main__":
    main()
