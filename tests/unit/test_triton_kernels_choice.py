"""What the host decides before a kernel of the Triton language is launched: splits, tiles, the backend."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distserve_kernels import backend as choice

pytest.importorskip("triton")

from distserve_kernels.triton_lang import backend as triton_backend
from distserve_kernels.triton_lang import splits
from distserve_kernels.triton_lang.rows import heads_per_program, norm_block
from distserve_kernels.triton_lang.tiles import Case, Chip, MeasuredTiles, Tile, TileTable
from distserve_kernels.triton_lang.tuning import fastest

CHIP = Chip("NVIDIA H200", 90, 132)
CASE = Case("decode", torch.bfloat16, 128, 16, 4)


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 200_000))
def test_splits_fill_the_chip_but_never_get_tiny(programs: int, processors: int, context: int) -> None:
    n = splits.count_splits(programs, processors, context)
    assert 1 <= n <= splits.MOST_SPLITS
    assert n == 1 or context // n >= splits.MIN_SPLIT
    if n * programs < 2 * processors and n < splits.MOST_SPLITS:
        assert context // (n + 1) < splits.MIN_SPLIT


@pytest.mark.parametrize(
    ("programs", "context", "expected"),
    [
        (8, 32768, 33),  # one sequence: twice the 132 multiprocessors, about
        (8, 600, 2),  # no part below 256 tokens
        (2048, 512, 1),  # a full batch
        (2048, 32768, 8),  # a full batch, in which one context may be long
        (1, 10**6, 128),
    ],
)
def test_splits_of_typical_steps(programs: int, context: int, expected: int) -> None:
    assert splits.count_splits(programs, 132, context) == expected


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sm", [80, 86, 90, 100])
def test_the_table_serves_every_case(kernel: str, dtype: torch.dtype, sm: int) -> None:
    table = TileTable.shipped()
    for head_dim in range(16, table.largest_head_dim + 1, 16):
        tiles = table.candidates(Case(kernel, dtype, head_dim, 16, 4), sm)
        assert all((tile.m is not None) == (kernel == "prefill") for tile in tiles)


def test_the_nearest_entry_of_the_table_serves() -> None:
    def entry(sm: int, head_dim: int, n: int) -> dict[str, object]:
        tile = {"n": n, "warps": 4, "stages": 2}
        return {"kernel": "decode", "sm": sm, "bytes": 2, "head_dim": head_dim, "tiles": [tile]}

    entries = [entry(80, 64, 16), entry(80, 128, 32), entry(90, 128, 64)]
    table = TileTable.parse({"schema": "kernel-tiles/1", "entries": entries}, "test")

    def n(sm: int, head_dim: int) -> int:
        return table.candidates(Case("decode", torch.float16, head_dim, 16, 1), sm)[0].n

    assert [n(80, 64), n(89, 80), n(90, 128), n(120, 48)] == [16, 32, 64, 64]
    with pytest.raises(ValueError, match="no tile for decode/float16/dim256"):
        n(90, 256)
    with pytest.raises(ValueError, match="sm_75"):
        n(75, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"wraps": 4}, "unknown key 'wraps'; allowed: n, warps, stages, m"),
        ({"n": 48}, "n=48 must be a power of two"),
        ({"stages": 0}, "stages=0 must be a positive integer"),
        ({"warps": None}, "warps=None must be a power of two"),
    ],
)
def test_a_wrong_tile_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tile.parse({"n": 64, "warps": 4, "stages": 2} | change, "here")


def test_a_tile_without_a_field_is_refused() -> None:
    with pytest.raises(ValueError, match="here: stages is missing"):
        Tile.parse({"n": 64, "warps": 4}, "here")


def test_a_table_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="must be 'kernel-tiles/1'"):
        TileTable.parse({"schema": "kernel-tiles/2", "entries": []}, "here")


def test_measured_tiles_outlive_the_process_and_stay_with_their_gpu(tmp_path: Path) -> None:
    tile, other = Tile(128, 8, 3), Case("prefill", torch.float16, 64, 32, 1)
    first, second = MeasuredTiles(tmp_path / "new", CHIP), MeasuredTiles(tmp_path / "new", CHIP)
    assert first.get(CASE) is None
    first.put(CASE, tile)
    second.put(other, Tile(64, 4, 2, 64))
    again = MeasuredTiles(tmp_path / "new", CHIP)
    assert again.get(CASE) == tile
    assert again.get(other) == Tile(64, 4, 2, 64)
    assert MeasuredTiles(tmp_path / "new", Chip("NVIDIA A100", 80, 108)).get(CASE) is None
    (path,) = (tmp_path / "new").iterdir()
    path.write_text(json.dumps({"schema": "measured-tiles/0"}))
    with pytest.raises(ValueError, match="must be 'measured-tiles/1'"):
        MeasuredTiles(tmp_path / "new", CHIP)


def test_a_backend_prefers_what_was_measured(tmp_path: Path) -> None:
    fresh = triton_backend.TritonBackend(CHIP, tmp_path)
    assert fresh.tile(CASE) == TileTable.shipped().candidates(CASE, 90)[0]
    fresh.measured.put(CASE, Tile(32, 2, 2))
    assert triton_backend.TritonBackend(CHIP, tmp_path).tile(CASE) == Tile(32, 2, 2)


def test_a_tile_that_does_not_fit_is_passed_over() -> None:
    from triton.runtime.errors import OutOfResources

    tiles = [Tile(64, 4, 2), Tile(128, 4, 9), Tile(32, 4, 2)]

    def seconds(tile: Tile) -> float:
        if tile.n == 128:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return float(tile.n)

    assert fastest(tiles, seconds) == tiles[2]
    with pytest.raises(RuntimeError, match="none of 1 tiles"):
        fastest(tiles[1:2], seconds)


@given(st.integers(1, 32768))
def test_norm_blocks_hold_a_row_and_few_registers(n: int) -> None:
    rows, columns, warps = norm_block(n)
    assert columns >= n
    assert rows * columns <= max(1024, 2 * n)
    assert rows * columns / (32 * warps) <= 64


@given(st.integers(1, 128), st.sampled_from([16, 64, 80, 96, 128, 256]))
def test_a_program_takes_no_more_heads_than_there_are(heads: int, head_dim: int) -> None:
    block = heads_per_program(heads, head_dim)
    assert block & (block - 1) == 0
    assert 1 <= block < 2 * heads


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        ("cpu", torch.bfloat16, 64, "runs on cuda, not cpu"),
        ("cuda", torch.float64, 64, "float64 is not"),
        ("cuda", torch.bfloat16, 72, "head_dim 72 is no multiple of 16"),
        ("cuda", torch.bfloat16, 256, "head_dim 256 is above 128"),
    ],
)
def test_what_the_backend_does_not_serve_is_named(
    device: str, dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    found = triton_backend.unsupported(torch.device(device), dtype, head_dim, 16)
    assert found is not None
    assert reason in found


def test_it_is_chosen_on_cuda_where_flash_attn_is_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Chip, "of", classmethod(lambda cls, device: CHIP))
    monkeypatch.setenv("DISTSERVE_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, choice.PROVIDERS["flash_attn"], None)  # its import fails
    caplog.set_level("INFO")
    assert choice.choose_backend("cuda:0", torch.bfloat16, 128, 16).name == "triton"
    assert "flash_attn: not installed" in caplog.text
    assert choice.choose_backend("cuda:0", torch.bfloat16, 128, 16, force="triton").name == "triton"
    assert choice.choose_backend("cuda:0", torch.bfloat16, 256, 16).name == "sdpa"
    with pytest.raises(ValueError, match="runs on cuda, not cpu"):
        choice.choose_backend("cpu", torch.bfloat16, 128, 16, force="triton")


def test_the_package_does_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("distserve_kernels.triton_lang")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # its import fails
    monkeypatch.setitem(sys.modules, choice.PROVIDERS["flash_attn"], None)
    assert choice.choose_backend("cuda:0", torch.bfloat16, 128, 16).name == "sdpa"
    with pytest.raises(ValueError, match="triton: not installed"):
        choice.choose_backend("cuda:0", torch.bfloat16, 128, 16, force="triton")
