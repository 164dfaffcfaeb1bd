"""Layer 2: names, values on the way, what does not fit, and the audit of a load."""

import json
import logging
import os
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import broken_headers
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from glm5lab.errors import CheckError, InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.part_reader import PartReader
from glm5lab.gguf.parts import whole
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.tensors import Tensor
from glm5lab.loading import names, progress, report, transforms
from glm5lab.loading.audit import Audit, not_taken, require_none
from glm5lab.loading.destinations import Copy
from glm5lab.loading.opened import forget, opened
from glm5lab.loading.prepare import (
    MARKER,
    find_gguf,
    is_prepared,
    open_prepared,
    prepare,
)
from glm5lab.loading.ranks import RankError, Ranks
from glm5lab.loading.reconcile import reconcile, require_complete
from glm5lab.loading.shapes import expected_shapes
from glm5lab.loading.streaming import Streamer
from glm5lab.serving.progress import BAR


def test_renames_act_on_whole_components():
    name = "model.layers.3.self_attn.indexer.weights_proj.weight"
    assert names.rename_component(name, "weight", "qweight").endswith(".weights_proj.qweight")
    assert names.vllm_parameter(name) == (
        "model.layers.3.self_attn.indexer.wk_weights_proj.weight",
        "1",
    )
    gate = "model.layers.3.mlp.gate.weight"
    assert names.vllm_parameter(gate) == (gate, "")


@pytest.mark.parametrize("sample", ["sample_f32", "sample_share", "sample_mix"])
def test_values_equal_the_hf_twin(sample, request):
    """The twin is written from HF weights without this layer: names, shapes and values agree."""
    path = request.getfixturevalue(sample)
    model = open_gguf(path)
    mappings = require_complete(model, hf_config(model)).loaded
    twin = load_file(path.parent / "hf" / "model.safetensors")
    seen = set()
    for name, tensor in transforms.hf_weights(model, mappings):
        assert name not in seen, f"{name} twice"
        seen.add(name)
        np.testing.assert_array_equal(tensor.numpy(), twin[name], err_msg=name)
    assert seen == set(twin)


def test_shared_layers_and_mtp_are_dropped_with_a_reason(sample_share, tmp_path):
    from glm5lab.gguf.sample import write_sample

    model = open_gguf(sample_share)
    config = hf_config(model)
    result = reconcile(model, config)
    assert result.problems == []
    assert not any("indexer" in m.gguf for m in result.dropped)  # written on full layers only
    extra = names.map_name("blk.2.indexer.proj.weight", {**config, "indexer_types": ["shared"] * 9})
    assert extra is not None
    assert "shares" in extra.dropped

    mtp = open_gguf(write_sample(tmp_path, kind="mtp"))
    dropped = reconcile(mtp, hf_config(mtp)).dropped
    assert dropped
    assert {m.gguf.split(".")[1] for m in dropped} == {str(hf_config(mtp)["num_hidden_layers"])}
    assert all("prediction" in m.dropped for m in dropped)


def test_what_does_not_fit_is_named(sample_f32):
    model = open_gguf(sample_f32)
    config = hf_config(model)
    tensors = dict(model.tensors)
    tensors["blk.0.attn_qq.weight"] = tensors.pop("blk.0.attn_q_a.weight")
    model.tensors = tensors
    config["index_head_dim"] += 1
    problems = "\n".join(reconcile(model, config).problems)
    assert "blk.0.attn_qq.weight: GLM-5 has no such tensor" in problems
    assert "blk.0.attn_q_a.weight: missing, expected shape [" in problems
    assert "blk.1.indexer.attn_k.weight: expected shape [129, " in problems
    with pytest.raises(InputError, match=r"complete GLM-5.*and \d+ more"):
        require_complete(model, config)


def test_every_expected_tensor_is_mapped(sample_f32):
    config = hf_config(open_gguf(sample_f32))
    for name in expected_shapes(config):
        mapping = names.map_name(name, config)
        assert mapping is not None
        assert mapping.vllm, name


def test_kv_b_parts_that_do_not_belong_together():
    with pytest.raises(ValueError, match="attn_k_b"):
        transforms.join_kv_b(np.zeros((2, 8, 4), np.float32), np.zeros((3, 5, 8), np.float32))


def test_prepare_writes_a_folder_and_reuses_its_cache(sample_f32, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM5LAB_CACHE", str(tmp_path / "cache"))
    folder = prepare(sample_f32)
    assert is_prepared(folder)
    written = (folder / MARKER).stat().st_mtime_ns
    assert prepare(sample_f32) == folder
    assert (folder / MARKER).stat().st_mtime_ns == written
    assert json.loads((folder / "config.json").read_text())["model_type"] == "glm_moe_dsa"
    assert open_prepared(folder).tensors.keys() == open_gguf(sample_f32).tensors.keys()
    assert list(folder.parent.glob(".*")) == []  # no work folder left behind


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"gguf": ["a"], "bytes": []}'])
def test_a_damaged_marker_is_named(text, sample_f32, tmp_path, monkeypatch):
    monkeypatch.setenv("GLM5LAB_CACHE", str(tmp_path / "cache"))
    folder = prepare(sample_f32)
    (folder / MARKER).write_text(text)
    with pytest.raises(InputError, match="is damaged"):
        opened(folder)


@pytest.mark.parametrize("cached", [True, False])
def test_a_folder_that_cannot_be_written_is_named(sample_f32, tmp_path, monkeypatch, cached):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GLM5LAB_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InputError, match=f"cannot be written.*{'GLM5LAB_CACHE' if cached else ''}"):
        prepare(sample_f32, None if cached else tmp_path / "file" / "folder")


def test_a_moved_shard_is_named(tmp_path):
    from glm5lab.gguf.sample import write_sample

    path = write_sample(tmp_path / "a")
    folder = prepare(path, tmp_path / "prepared")
    path.rename(tmp_path / "elsewhere.gguf")
    with pytest.raises(InputError, match="prepare"):
        open_prepared(folder)


def test_a_folder_is_opened_once_while_its_files_stay_as_they_are(tmp_path):
    from glm5lab.gguf.sample import write_sample

    path = write_sample(tmp_path / "a")
    folder = prepare(path, tmp_path / "prepared")
    first = opened(folder)
    assert opened(folder) is first
    assert opened(folder).complete is first.complete
    os.utime(path, ns=(1, 1))
    second = opened(folder)
    assert second is not first
    forget()
    assert opened(folder) is not second
    forget()
    with path.open("ab") as file:
        file.write(b"x")
    with pytest.raises(InputError, match="run `glm5lab prepare` again"):
        opened(folder)
    with pytest.raises(InputError, match=r"has no glm5lab\.json"):
        opened(tmp_path)


@pytest.mark.parametrize("mistake", broken_headers.MISTAKES)
def test_what_is_wrong_with_a_file_since_it_was_prepared_is_named(mistake, sample_f32, tmp_path):
    """Of the same size, so that only its header tells; every rank looks at it so."""
    path = Path(shutil.copy(sample_f32, tmp_path))
    folder = prepare(path, tmp_path / "prepared")
    broken_headers.make(path, mistake)
    with pytest.raises(InputError) as error:
        _ = opened(folder).complete
    for part in (path.name, *broken_headers.MISTAKES[mistake].says):
        assert part in str(error.value)


def test_find_gguf_leaves_other_models_alone(sample_f32, tmp_path):
    assert find_gguf(sample_f32)
    (tmp_path / "config.json").write_text("{}")
    assert not find_gguf(tmp_path)
    assert not find_gguf(tmp_path / "config.json")
    assert not find_gguf(tmp_path / "absent")


def audit_of(*boxes, shape=(4, 6), padded=()):
    """An audit that was told of these copies: (tensor, rows) or (tensor, rows, columns)."""
    audit = Audit({"p": shape, "whole": (2,)}, padded)
    audit.filled(Copy("whole", whole(tensor_like("w", (2,)))))
    for name, rows, *columns in boxes:
        width = columns[0] if columns else shape[-1]
        part = whole(tensor_like(name, (len(rows), width)))
        audit.filled(Copy("p", part, row=rows.start))
    return audit


def tensor_like(name, shape):
    return Tensor(name, shape, 0, "F32", 4 * int(np.prod(shape)), 0, Path("f.gguf"), 0)


def test_audit_passes_a_complete_load():
    assert audit_of(("a", range(3)), ("b", range(3, 4))).problems() == []


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        ([], "p: no tensor fills it"),
        ([("a", range(3))], "p: 1 of its 4 rows are not filled"),
        ([("a", range(3)), ("b", range(2, 4))], "p: filled twice, again by b"),
    ],
)
def test_audit_names_what_is_wrong(boxes, message):
    with pytest.raises(CheckError, match=f"the load audit found 1 problems: {message}"):
        require_none(audit_of(*boxes).problems())


@pytest.mark.parametrize("box", [("a", range(2, 5)), ("a", range(2), 7), ("a", range(2), 5)])
def test_a_copy_that_does_not_fit_its_parameter_is_named(box):
    with pytest.raises(CheckError, match=r"a: 1 x \d x \d from 0, \d on do not fit p \[4, 6\]"):
        audit_of(box)


def test_padding_is_left_to_those_who_may_have_it():
    assert audit_of(("a", range(3), 5), padded={"p"}).problems() == []


def test_ranks_that_took_too_little_or_parts_that_overlap_are_named():
    tensor = tensor_like("t", (4, 6))

    def problems(*rows):
        return not_taken([{"t": [(0, 1, *r, 0, 6)]} for r in rows], [tensor])

    assert problems((0, 4)) == []
    assert problems((0, 4), (0, 4)) == []
    assert problems((0, 2), (2, 4)) == []
    assert problems((0, 2), (0, 2)) == [
        "t: the ranks together took 12 of its 24 numbers, and several the same"
    ]
    assert problems((0, 3), (2, 4)) == ["t: the ranks took overlapping parts of it"]
    assert not_taken([{}], [tensor]) == ["t: the ranks together took 0 of its 24 numbers"]


class DictStore(dict[str, bytes]):
    """torch's store, in this process."""

    def set(self, key, value):
        self[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key, default=None):
        return self[key]

    def check(self, keys):
        return all(key in self for key in keys)


def test_a_failure_reaches_every_rank_and_the_first_one_stays():
    store = DictStore()
    ranks = [Ranks(store, rank, range(3), "x") for rank in range(3)]
    ranks[0].look(now=True)
    ranks[1].fail(InputError("f.gguf", "ends", "fetch it"))
    ranks[2].fail(ValueError("second"))
    for rank in (ranks[0], ranks[2]):
        with pytest.raises(RankError, match=r"rank 1 could not load: f\.gguf: ends; fetch it"):
            rank.look(now=True)
    with pytest.raises(RankError, match="rank 1"):
        ranks[0].exchange("done")
    Ranks(store, 0, range(3), "y").look(now=True)
    alone = Ranks(None)
    alone.fail(ValueError("nobody listens"))
    assert alone.exchange(5) == [5]


def test_ranks_exchange_in_their_order():
    store = DictStore()
    answers: dict[int, Any] = {}

    def work(rank):
        answers[rank] = Ranks(store, rank, (2, 5), "x").exchange({"from": rank})

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (5, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {rank: [{"from": 2}, {"from": 5}] for rank in (2, 5)}


def test_progress_says_bytes_seconds_and_layer(caplog, monkeypatch):
    monkeypatch.setattr(progress, "SAY_S", 0.0)
    logger = logging.getLogger("progress")
    with caplog.at_level(logging.INFO, "progress"):
        shown = progress.Progress(4 << 30, logger, True, "rank 0 of 2")
        shown.add(1 << 30, "blk.7.ffn_up_exps.weight")
        silent = progress.Progress(4 << 30, logger, False, "rank 1 of 2")
        silent.add(1 << 30, "blk.7.ffn_up_exps.weight")
    assert len(caplog.messages) == 1
    assert re.fullmatch(
        r"Loading:  25%\| 1\.0 of 4\.0 GiB in \d+\.\d s \([\d,]+ MiB/s\), rank 0 of 2, at blk\.7",
        caplog.messages[0],
    )
    assert BAR.match(caplog.messages[0])


def test_the_report_has_a_name_for_every_rank(monkeypatch, tmp_path):
    monkeypatch.delenv(report.VARIABLE, raising=False)
    assert report.report_path(0, 1) is None
    monkeypatch.setenv(report.VARIABLE, "/tmp/load.json")
    names = [str(report.report_path(*a)) for a in ((0, 1), (3, 8), (3, 8, True), (0, 1, True))]
    assert names == [
        *("/tmp/load.json", "/tmp/load.rank3.json"),
        *("/tmp/load.mtp.rank3.json", "/tmp/load.mtp.json"),
    ]
    with pytest.raises(InputError, match="cannot be written"):
        report.ask_for_report(Path("/nowhere/report.json"))
    report.ask_for_report(None)
    assert os.environ[report.VARIABLE] == "/tmp/load.json"
    report.ask_for_report(tmp_path / "r.json")
    assert os.environ[report.VARIABLE] == str(tmp_path / "r.json")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "r.json").write_text("of an earlier load")
    report.ask_for_report(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == "of an earlier load"


def test_threads_that_read_look_to_the_gpu_of_their_parameters(monkeypatch, sample_f32):
    tensor = open_gguf(sample_f32).tensors["blk.0.attn_q_a.weight"]
    parameter = torch.zeros(tensor.shape)
    seen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", seen.append)
    with PartReader() as reader:
        streamer: Any = Streamer(reader, {"p": parameter}, threads=2)
        list(streamer.run([Copy("p", whole(tensor))]))
        assert seen == []
        streamer._buffers = SimpleNamespace(wait=lambda: None)
        list(streamer.run([Copy("p", whole(tensor))]))
    assert seen
    assert set(seen) == {parameter.device}


def test_damage_is_named_with_its_place(tmp_path, sample_mix):
    """Every type is looked at as it is loaded, packed or not; the block is counted in the whole."""
    model = open_gguf(sample_mix)
    name = "blk.1.ffn_down_exps.weight"
    tensor = model.tensors[name]
    assert tensor.type == "Q4_K"
    path = Path(shutil.copy(tensor.path, tmp_path / "damaged.gguf"))
    with path.open("r+b") as file:
        file.seek(tensor.offset + (5 * 256 + 7) * 144 + 2)
        file.write(np.float16(np.nan).tobytes())
    part = replace(whole(replace(tensor, path=path)), stack=range(4, 12), rows=range(3, 250))
    for packed, dtype in ((True, torch.uint8), (False, torch.float32)):
        parameter = torch.zeros(8, 247, 144 if packed else 256, dtype=dtype)
        copy = Copy("p", part, packed=packed)
        with PartReader() as reader, pytest.raises(InputError) as error:
            list(Streamer(reader, {"p": parameter}).run([copy]))
        assert f"tensor '{name}' (Q4_K) is damaged" in str(error.value)
        assert "at matrix 5, row 7, block 0" in str(error.value)
