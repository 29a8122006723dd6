"""On a GPU: the same rows, the same rules, and one wait of the host per encoding. Skipped without one."""

from __future__ import annotations

import warnings

import pytest
import torch
from codec_helpers import CODECS, LOSSY, activations, codec, same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("name", CODECS)
def test_rows_on_a_gpu_are_encoded_as_well_as_on_the_host(name):
    rows = activations(8, 640, torch.bfloat16)
    data = codec(name).encode(rows.cuda())
    back = codec(name).decode(data, *rows.shape, rows.dtype)
    on_host = codec(name).decode(codec(name).encode(rows), *rows.shape, rows.dtype)
    if codec(name).lossless:
        assert same_bits(back, rows)
    else:
        assert (back - rows).norm() <= 1.01 * (on_host - rows).norm()


@pytest.mark.parametrize("name", LOSSY)
def test_on_a_gpu_too_a_row_depends_on_nothing_but_itself(name):
    rows = activations(8, 640, torch.bfloat16).cuda()
    assert codec(name).encode(rows) == b"".join(codec(name).encode(row[None]) for row in rows)


@pytest.mark.parametrize("name", CODECS)
def test_the_host_waits_once(name):
    rows = activations(8, 640, torch.bfloat16).cuda()
    codec(name).encode(rows)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            codec(name).encode(rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1
