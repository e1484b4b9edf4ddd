"""`python -m transformer_bench.profile_steps` reports the percentages of each kind of work, which add up to 100."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys

import pytest

PROFILE = "transformer_bench.profile_steps"


@pytest.mark.parametrize(
    ("task", "package", "kinds"),
    [
        ("train", "numpy", ["linear layers", "optimizer", "loss", "attention", "normalization", "activations"]),
        ("train", "torch", ["linear layers", "optimizer", "loss, or choice of tokens", "attention", "normalization"]),
        ("train", "jax", ["matmuls", "indexing", "copies and transposes", "other loops: sums, normalization"]),
        ("train", "tf", ["matmuls", "optimizer", "loss", "indexing", "copies and transposes", "other loops: sums"]),
        pytest.param(
            *("decode", "tf", ["matmuls", "indexing", "other loops: sums, normalization"]),
            marks=pytest.mark.extended("profiles"),
        ),
        ("decode", "numpy", ["linear layers", "attention", "choice of tokens", "normalization", "activations"]),
    ],
)
def test_profile_splits_the_time_into_kinds_of_work(task, package, kinds):
    run = subprocess.run(
        [sys.executable, "-m", PROFILE, task, package, "--config", "tiny", "--calls", "1", "--largest", "1"],
        **{"check": True, "capture_output": True, "text": True},
    )
    head, *rows = run.stdout.splitlines()
    assert re.fullmatch(r"[\d,]+ ms per call, one thread", head)
    shares = {row.split("  ")[-1]: float(row.split("%")[0]) for row in rows[:-1]}
    assert sum(shares.values()) == pytest.approx(100.0, abs=1.0)
    assert all(any(shares[found] > 0.0 for found in shares if found.startswith(kind)) for kind in kinds)


PROGRAM = """HloModule jit_step, is_scheduled=true

%fused.1 (a: f32[2,3], b: f32[3,4]) -> f32[2,4] {
  %a = f32[2,3]{1,0} parameter(0)
  %b = f32[3,4]{1,0} parameter(1)
  ROOT %dot.7 = f32[2,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%fused.2 (c: f32[2,4]) -> f32[4] {
  %c = f32[2,4]{1,0} parameter(0)
  ROOT %reduce.8 = f32[4]{0} reduce(%c), dimensions={0}, to_apply=%add
}

ENTRY %main (a: f32[2,3], b: f32[3,4]) -> f32[4] {
  %ynn_fusion = f32[2,4]{1,0} fusion(%a, %b), kind=kCustom, calls=%fused.1, metadata={op_name="jit(step)/dot"}
  ROOT %ynn_fusion.1 = f32[4]{0} fusion(%ynn_fusion), kind=kCustom, calls=%fused.2, metadata={op_name="sum"}
}
"""


def test_fusions_with_matrix_matmuls_are_distinguished_from_sums(tmp_path):
    matmuls = runpy.run_module(PROFILE)["matmuls"]
    (tmp_path / "module_1.jit_step.cpu_after_optimizations.txt").write_text(PROGRAM)
    assert matmuls(tmp_path) == {("jit_step", "ynn_fusion"): True, ("jit_step", "ynn_fusion.1"): False}
    swapped = (
        PROGRAM.replace("calls=%fused.1", "calls=%fused").replace("fused.2,", "fused.1,").replace("fused,", "fused.2,")
    )
    (tmp_path / "module_2.jit_step.cpu_after_optimizations.txt").write_text(swapped)
    assert set(matmuls(tmp_path).values()) == {True}
