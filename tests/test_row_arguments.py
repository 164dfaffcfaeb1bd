"""Layer 3: what stores, gathers and packs rows refuses before it launches."""

import re

import pytest
import torch

from glm5lab.attention import kv_cache, row_formats

KV, KEYS, SLOTS = torch.zeros(9, 576), torch.zeros(4, 32), torch.zeros(2, dtype=torch.int64)
LATENT, ROPE, PACKED = torch.zeros(4, 512), torch.zeros(4, 64), torch.zeros(4, 656).byte()


@pytest.mark.parametrize("module", [row_formats, kv_cache])
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("store_rows", {"slots": [0, 1]}, "slots: expected a tensor, got list [0, 1]"),
        (
            "store_rows",
            {"slots": SLOTS.bool()},
            "slots: expected integers [N], got torch.bool (2,)",
        ),
        ("store_rows", {"latent": None}, "latent: expected a tensor, got NoneType"),
        ("store_rows", {"rope": 1}, "rope: expected a tensor or None, got int 1"),
        ("store_rows", {"latent": LATENT[:2, :0]}, "latent: expected a width of at least 1, got 0"),
        ("store_rows", {"cache": KV[:1].expand(9, 576)}, "cache: expected elements that share no"),
        ("store_index_keys", {"keys": [1.0]}, "keys: expected a tensor, got list [1.0]"),
        (
            "store_index_keys",
            {"cache": torch.zeros(1, 4, 4).byte(), "keys": KEYS[:, :0]},
            "keys: expected a width of at least 1, got 0",
        ),
        (
            "store_index_keys",
            {"cache": torch.zeros(1, 4, 36).byte().expand(2, 4, 36)},
            "cache: expected elements that share no memory",
        ),
        ("gather", {"slots": 1}, "slots: expected a tensor, got int 1"),
        (
            "gather",
            {"cache": torch.zeros(())},
            "cache: expected [rows, width] or [pages, page_size",
        ),
        ("gather", {"cache": KV[:0]}, "cache: expected a row at least, got shape (0, 576)"),
        ("gather", {"cache": KV[:, :0]}, "cache: expected a row at least, got shape (9, 0)"),
        (
            "gather",
            {"cache": KV.to(torch.float8_e4m3fn)},
            "cache: expected float64, float32, bfloat16, float16 or uint8, got torch.float8_e4m3fn",
        ),
        (
            "gather",
            {"dtype": torch.float8_e4m3fn},
            "dtype: expected float64, float32, bfloat16 or float16, got torch.float8_e4m3fn",
        ),
        (
            "gather",
            {"dtype": "float32"},
            "dtype: expected float64, float32, bfloat16 or float16, got str 'float32'",
        ),
    ],
)
def test_what_stores_and_gathers_names_what_does_not_fit(module, name, change, message):
    given = {
        "store_rows": {"cache": KV, "latent": LATENT[:2], "rope": ROPE[:2]},
        "store_index_keys": {"cache": torch.zeros(1, 4, 36).byte(), "keys": KEYS},
        "gather": {"cache": KV},
    }
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(module, name)(**{"slots": SLOTS, **given[name], **change})


@pytest.mark.parametrize(
    ("call", "given", "message"),
    [
        ("pack", (LATENT[:, :448], ROPE), "latent: expected floating point [..., 512], got torch"),
        ("pack", (LATENT, ROPE.int()), "rope: expected floating point [..., 64], got torch.int32"),
        ("pack", (LATENT, ROPE[:3]), "rope: expected [4, 64], beside latent, got (3, 64)"),
        ("pack", (LATENT, ROPE.to("meta")), "rope: expected a tensor on cpu, got meta"),
        (
            "unpack",
            (PACKED.float(),),
            "rows: expected uint8 [..., 656], got torch.float32 (4, 656)",
        ),
        ("unpack", (PACKED[:, :655],), "rows: expected uint8 [..., 656], got torch.uint8 (4, 655)"),
        ("unpack", (None,), "rows: expected a tensor, got NoneType"),
        ("unpack", (PACKED, torch.int32), "dtype: expected float64, float32, bfloat16 or float16"),
    ],
)
def test_what_packs_and_unpacks_names_what_does_not_fit(call, given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(row_formats, f"{call}_fp8_rows")(*given)
