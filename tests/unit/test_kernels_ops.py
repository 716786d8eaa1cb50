"""The fused operations and packed products against their torch twins, and the build of the C library."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from distserve_kernels import compiled, memory, ops, ops_reference
from distserve_kernels.linear import PackedLinear

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    tolerance = TOLERANCE[want.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(2)


@pytest.mark.parametrize("size", [8, 64, 100, 768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    weight = torch.randn(size).to(dtype)
    wide = torch.randn(5, 2 * size).to(dtype)
    heads = torch.randn(5, 6, size).to(dtype)
    for x in (
        wide[:, :size].contiguous(),
        wide[:, size:],
        wide[0, :size],
        heads,
        heads[:, 1:3],
        wide[:0, :size],
    ):
        close(ops.rms_norm(x, weight, 1e-5), ops_reference.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("size", [8, 100, 768])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm_updates_the_residual(size: int, dtype: torch.dtype) -> None:
    weight, x, residual = (torch.randn(*s).to(dtype) for s in ((size,), (5, size), (5, size)))
    twin = residual.clone()
    want, _ = ops_reference.add_rms_norm(x, twin, weight, 1e-5)
    got, same = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert same is residual
    close(residual, twin)
    close(got, want)


@pytest.mark.parametrize("size", [8, 100, 2048])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(size: int, dtype: torch.dtype) -> None:
    for x in (torch.randn(7, 2 * size), torch.randn(2, 3, 2 * size) * 50, torch.zeros(0, 2 * size)):
        close(ops.silu_mul(x.to(dtype)), ops_reference.silu_mul(x.to(dtype)))


@pytest.mark.parametrize(("dim", "half"), [(8, 4), (64, 32), (80, 40), (128, 64), (64, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_in_place_on_slices(dim: int, half: int, dtype: torch.dtype) -> None:
    merged = torch.randn(9, 8, dim).to(dtype)
    twin = merged.clone()
    angles = torch.randn(9, half)
    ops.rotary(merged[:, :4], merged[:, 4:6], angles.cos(), angles.sin())
    ops_reference.rotary(twin[:, :4], twin[:, 4:6], angles.cos(), angles.sin())
    close(merged, twin)
    assert torch.equal(merged[:, 6:], twin[:, 6:])  # v is untouched


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 1), (32, 16), (100, 70), (64, 1500), (96, 2048), (33, 4096)]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_linear(outputs: int, inputs: int, dtype: torch.dtype, with_bias: bool) -> None:
    weight = (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if with_bias else None
    linear = PackedLinear(weight, bias)
    for rows in (0, 1, 2, 6, 7, 12, 13, 32, 50):
        x = torch.randn(rows, inputs + 3).to(dtype)[:, :inputs]  # with a row stride
        close(linear(x), torch.nn.functional.linear(x, weight, bias))
    three = torch.randn(2, 3, inputs).to(dtype)
    close(linear(three), torch.nn.functional.linear(three, weight, bias))


def test_packed_linear_does_not_depend_on_the_batch() -> None:
    linear = PackedLinear(torch.randn(70, 300))
    if linear.name != "c":
        pytest.skip("promised by the C kernel only")
    x = torch.randn(40, 300)
    whole = linear(x)
    for rows in (1, 5, 8, 13, 39):
        assert torch.equal(linear(x[:rows]), whole[:rows])


def test_fp16_is_served_by_torch() -> None:
    weight, x = torch.randn(8, 4).half(), torch.randn(3, 4).half()
    linear = PackedLinear(weight)
    assert linear.name == "torch"
    torch.testing.assert_close(linear(x), torch.nn.functional.linear(x, weight))
    torch.testing.assert_close(ops.silu_mul(x), ops_reference.silu_mul(x))


def test_big_tensors_start_on_a_huge_page_and_are_zero() -> None:
    big = memory.zeros((1 << 20, 3), torch.float32)
    assert big.data_ptr() % memory.HUGE_PAGE == 0
    assert big.shape == (1 << 20, 3)
    assert not big.any()
    big[-1] = 1
    assert big.sum() == 3
    assert memory.zeros((0, 4), torch.bfloat16).shape == (0, 4)


FAULTS = """
import resource, sys
import torch
from distserve_kernels import memory

def layers():
    for _ in range(20):
        torch.ones(10 << 20)  # 40 MB

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    layers()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

layers()
given_back = faults()
memory.keep_freed()
layers()
print(given_back, faults())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or tuple(map(int, platform.libc_ver()[1].split(".")[:2])) < (2, 35),
    reason="blocks of 40 MB can't be kept",
)
def test_what_a_step_frees_is_not_faulted_in_again_by_the_next() -> None:
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    if given_back < 1000:
        pytest.skip("this system has huge pages for every program")
    assert kept < given_back / 10


def test_build_once_for_concurrent_builders(tmp_path: Path) -> None:
    compiler = compiled.find_compiler()
    if compiler is None:
        pytest.skip("no C compiler")
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(compiled.build(tmp_path, compiler))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert len(found) == 3
    assert len(set(found)) == 1
    assert [p.suffix for p in tmp_path.iterdir() if p.suffix != ".lock"] == [".so"]


def test_build_without_a_compiler_or_with_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(compiled.BuildError, match="no C compiler"):
        compiled.build(tmp_path, None)
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho it broke >&2\nexit 1\n")
    broken.chmod(0o755)
    with pytest.raises(compiled.BuildError, match="it broke"):
        compiled.build(tmp_path, str(broken))
    assert not list(tmp_path.glob("*.so"))


def test_build_that_hangs_is_ended(tmp_path: Path) -> None:
    slow = tmp_path / "cc"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    with pytest.raises(compiled.BuildError, match="took more than"):
        compiled.build(tmp_path, str(slow), timeout_s=0.2)


def test_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DISTSERVE_CACHE", str(blocked))
    folder = compiled.cache_folder()
    assert os.access(folder, os.W_OK)
    assert blocked not in folder.parents


def test_torch_serves_where_the_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "library", lambda: None)
    ops._bound.cache_clear()
    try:
        x = torch.randn(3, 16)
        close(ops.silu_mul(x), ops_reference.silu_mul(x))
        from distserve_kernels.backend import choose_backend

        assert choose_backend("cpu", torch.float32, 64, 16).name == "sdpa"
    finally:
        ops._bound.cache_clear()
