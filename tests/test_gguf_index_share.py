"""IndexShare from the key, the context rule and the tensors: agreeing, and in conflict."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from glm5lab.architecture import MAX_BLOCKS
from glm5lab.errors import InputError
from glm5lab.gguf.config import config_notes, hf_config, read_architecture
from glm5lab.gguf.index_share import KEY, RULE, TENSORS, IndexShare, index_share
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.loading.prepare import prepare

INDEXER_TYPES = "glm-dsa.attention.indexer.types"


def share(model: GgufModel) -> IndexShare:
    return index_share(model, stated(model))


def stated(model: GgufModel) -> Any:
    from glm5lab.architecture import Glm5Architecture

    return Glm5Architecture.from_metadata(model.metadata)


def pattern(found: IndexShare) -> str:
    return "".join("F" if kind == "full" else "S" for kind in found.types)


def changed(model: GgufModel, drop: tuple[str, ...] = (), **keys: Any) -> GgufModel:
    """Metadata replaced (None drops a key), tensors that start with `drop` left out."""
    new = model.metadata | {f"glm-dsa.{k.replace('__', '.')}": v for k, v in keys.items()}
    metadata = {k: v for k, v in new.items() if v is not None}
    tensors = {k: t for k, t in model.tensors.items() if not (drop and k.startswith(drop))}
    return dataclasses.replace(model, metadata=metadata, tensors=tensors)


@pytest.fixture(scope="module")
def full(sample_f32: Path) -> GgufModel:
    return open_gguf(sample_f32)


@pytest.fixture(scope="module")
def shared(sample_share: Path) -> GgufModel:
    return open_gguf(sample_share)


def test_all_agree(full: GgufModel, shared: GgufModel) -> None:
    assert share(full) == IndexShare(("full",) * 5, (RULE, TENSORS))
    assert config_notes(full) == []
    found = share(shared)
    assert (pattern(found), found.sources) == ("FFSFS", (KEY, TENSORS))
    assert found.conflicts == found.notes == ()
    assert config_notes(shared) == [
        "IndexShare: 3 of 5 layers select for themselves (0-1,3), by attention.indexer.types, "
        "indexer tensors"
    ]


def test_the_rule_and_the_tensors(full: GgufModel) -> None:
    """As GLM-5.2 files without the key: indexers where the rule has them, and on every layer."""
    longer = changed(full, context_length=1 << 20)
    found = share(longer)
    assert (pattern(found), found.sources, found.conflicts) == ("FFFSS", (RULE,), ())
    assert found.notes == (
        "blocks 3-4 share their indices but hold indexer tensors, too (copies in many GLM-5.2 "
        "files): not loaded",
    )
    without = changed(longer, drop=("blk.3.indexer", "blk.4.indexer"))
    assert share(without) == IndexShare(found.types, (RULE, TENSORS))


def test_the_tensors_alone(shared: GgufModel) -> None:
    """No key and a short context say all full; the file cannot be that."""
    model = changed(shared, attention__indexer__types=None)
    found = share(model)
    assert (pattern(found), found.sources) == ("FFSFS", (TENSORS,))
    assert found.conflicts == (
        "context rule says full for blocks 2,4, where the file has no indexer tensors; the "
        "tensors decide: those layers are taken for shared",
    )
    assert hf_config(model)["index_topk_pattern"] == "FFSFS"
    assert config_notes(model)[1].startswith("IndexShare conflict: context rule says full")


def test_prepare_says_what_was_decided(
    shared: GgufModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(shared, tmp_path / "agrees")
    assert not caplog.records
    prepare(changed(shared, attention__indexer__types=None), tmp_path / "decided")
    assert "the tensors decide" in caplog.text
    written = [(tmp_path / n / "config.json").read_text() for n in ("agrees", "decided")]
    assert written[0] == written[1]


def test_a_key_that_the_tensors_contradict(shared: GgufModel) -> None:
    """The key decides; a block that lacks its indexer is then missing, not silently shared."""
    model = changed(shared, attention__indexer__types=[True, True, True, True, False])
    found = share(model)
    assert (pattern(found), found.sources) == ("FFFFS", (KEY,))
    assert found.conflicts == (
        "attention.indexer.types says full for block 2, where the file has no indexer tensors; "
        "the file is incomplete, or attention.indexer.types is wrong",
    )
    fewer = share(changed(shared, attention__indexer__types=[True, False, False, False, False]))
    assert (pattern(fewer), fewer.conflicts) == ("FSSSS", ())
    assert fewer.notes[0].startswith("blocks 1,3 share their indices but hold indexer tensors")


def test_a_key_that_the_rule_contradicts(shared: GgufModel) -> None:
    found = share(changed(shared, context_length=1 << 20))
    assert (pattern(found), found.sources) == ("FFSFS", (KEY, TENSORS))
    assert found.conflicts[0].startswith("attention.indexer.types differs from GLM-5.2's pattern")


def test_first_layer_and_parts(full: GgufModel) -> None:
    found = share(changed(full, drop=("blk.0.indexer",)))
    assert pattern(found) == "FFFFF"  # layer 0 has none to share with: the file lacks tensors
    assert "says full for block 0" in found.conflicts[0]
    partial = share(changed(full, drop=("blk.3.indexer.k_norm",)))
    assert pattern(partial) == "FFFFF"
    assert partial.conflicts == (
        "block 3 holds 3 of 5 indexer tensors; indexer.k_norm.bias, indexer.k_norm.weight missing",
    )
    none = share(dataclasses.replace(full, tensors={}))
    assert (pattern(none), none.sources, none.conflicts) == ("FFFFF", (RULE,), ())


def test_one_value_for_all_layers(full: GgufModel) -> None:
    """llama.cpp takes an array or one value."""
    assert pattern(share(changed(full, attention__indexer__types=True))) == "FFFFF"
    with pytest.raises(InputError, match="layer 0 is shared"):
        read_architecture(changed(full, attention__indexer__types=False))


def test_counts_stay_small(full: GgufModel) -> None:
    with pytest.raises(InputError, match=f"above llama.cpp's limit of {MAX_BLOCKS}"):
        read_architecture(changed(full, block_count=1 << 40))


def test_the_draft_layer_that_is_not_there(sample_mtp: Path) -> None:
    model = open_gguf(sample_mtp)
    assert config_notes(model) == []
    assert config_notes(changed(model, drop=("blk.4.",))) == [
        "nextn_predict_layers is 1, but the file holds no block 4: no multi-token prediction"
    ]


@pytest.mark.parametrize("name", sorted(read_layouts()))
def test_public_files(name: str, tmp_path: Path) -> None:
    layout = read_layouts()[name]
    model = open_gguf(write_layout(layout, tmp_path))
    found = share(model)
    assert found.conflicts == ()
    if "5.2" not in name:
        assert found == IndexShare(("full",) * 78, (RULE, TENSORS))
        return
    assert found.full_layers == [0, 1, 2, *range(6, 75, 4)]
    copies = name == "glm-5.2-ud-iq2_xxs"  # unsloth's hold an indexer on every layer
    expected = ((RULE,), 1) if copies else ((RULE, TENSORS), 0)
    assert (found.sources, len(found.notes)) == expected


@pytest.mark.parametrize("block", ["²", "9" * 5000, "-1", " 1", "1_0", ""])
def test_block_numbers_are_numbers(full: GgufModel, block: str) -> None:
    """A name like a block's, but without a number, is a tensor outside the blocks."""
    odd = dataclasses.replace(
        full.tensors["blk.1.indexer.attn_k.weight"], name=f"blk.{block}.indexer.attn_k.weight"
    )
    assert (odd.layer, odd.role) == (None, odd.name)
    model = dataclasses.replace(full, tensors=full.tensors | {odd.name: odd})
    assert share(model) == share(full)
