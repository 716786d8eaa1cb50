"""The measurement itself: two processes, plausible figures."""

from __future__ import annotations

from distserve.transfer.measure import KVShape, TransferRate, measure


def test_rates_of_both_sizes_are_reported() -> None:
    seen: list[TransferRate] = []
    shape = KVShape(layers=2, kv_heads=2, head_dim=8)
    rates = measure([16, 100], shape, repeats=1, staging_bytes=4096, progress=seen.append)
    assert seen == rates
    assert [r.tokens for r in rates] == [16, 100]
    assert [r.bytes for r in rates] == [shape.block_bytes, 7 * shape.block_bytes]
    for rate in rates:
        assert rate.channel == "gloo"
        assert rate.pull_bytes_s > 0
        assert rate.share == rate.pull_bytes_s / rate.stream_bytes_s
