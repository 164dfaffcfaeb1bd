"""Layer 5 before anything starts: layout, keys, machines, and one clear line for each mistake."""

import shlex
import subprocess
import sys
import tempfile

import pytest

from glm5lab.env import Gpu
from glm5lab.errors import InputError
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.memory import GIB
from glm5lab.gguf.reader import open_gguf
from glm5lab.serving import planning, serve
from glm5lab.serving.access import access, is_local
from glm5lab.serving.command import option_value
from glm5lab.serving.cpu_plan import plan_cpu
from glm5lab.serving.nodes import Nodes
from glm5lab.serving.planning import NoFitError, Wanted, layout, tokens

GLM5LAB = [sys.executable, "-m", "glm5lab"]


@pytest.fixture(scope="module")
def model(sample_f32):
    return open_gguf(sample_f32)


def test_the_cpu_s_cache_holds_what_vllm_says(model):
    """The engine's line: "CPU KV cache size: 76,224 tokens" for 1 GiB in float32."""
    plan = plan_cpu(model, hf_config(model))
    page = 64 * 5 * 4 * (512 + 64 + 128)
    assert (plan.cache // page * 64, plan.context) == (76_224, 4096)
    assert plan.options() == []
    assert plan.needed == plan.weights + plan.cache + plan.loading + plan.processes


def test_the_cpu_s_context_and_cache_follow_each_other(model):
    config = hf_config(model) | {"max_position_embeddings": 1 << 20}
    assert plan_cpu(model, config).options() == ["--max-model-len", "76224"]
    asked = plan_cpu(model, config, context=200_000)
    size = int(option_value(asked.options(), "--kv-cache-memory-bytes") or 0)
    assert size >= 200_000 * 14_080 > size - 64 * 14_080
    assert option_value(asked.options(), "--max-model-len") == "200000"


def test_too_little_memory_is_refused_with_numbers_and_a_way_out(model):
    with pytest.raises(NoFitError, match=r"= 2.75 GiB, --gpu-memory gives 0.50 GiB; .*plan FILE"):
        layout(model, "cpu", Wanted(gpu_memory=0.5))
    needed = plan_cpu(model, hf_config(model)).needed / GIB
    assert layout(model, "cpu", Wanted(gpu_memory=needed + 0.01)).options == []
    with pytest.raises(NoFitError, match=r"-- --dtype bfloat16` would need"):
        layout(model, "cpu", Wanted(gpu_memory=needed - 0.03))
    with pytest.raises(InputError, match=r"--gpu-memory: 0\.0: expected GiB above 0"):
        layout(model, "cpu", Wanted(gpu_memory=0.0))


def test_the_free_memory_counts_where_none_is_given(model, monkeypatch):
    monkeypatch.setattr(planning, "available_memory", lambda: GIB)
    with pytest.raises(NoFitError, match=r"free are 1.00 GiB"):
        layout(model, "cpu", Wanted())
    monkeypatch.setattr(planning, "available_memory", lambda: None)
    assert layout(model, "cpu", Wanted()).platform == "cpu"


def test_ranks_on_a_cpu(model):
    found = layout(model, "cpu", Wanted(tp=2, gpu_memory=20))
    assert found.options == ["--tensor-parallel-size", "2"]
    one, two = (plan_cpu(model, hf_config(model), tp=tp) for tp in (1, 2))
    assert two.cache == 2 * one.cache
    assert one.weights < two.weights < 2 * one.weights
    half = plan_cpu(model, hf_config(model), tp=2, machines=2)
    assert (half.weights, half.cache, half.ranks) == (two.weights // 2, one.cache, 1)
    spread = layout(model, "cpu", Wanted(nodes=2, gpu_memory=20))
    assert spread.options == ["--tensor-parallel-size", "2"]


def test_what_vllm_would_refuse_on_a_cpu_is_refused_before_it_starts(model):
    with pytest.raises(NoFitError, match="vLLM cannot run it so: 4 attention heads do not divide"):
        layout(model, "cpu", Wanted(tp=3, gpu_memory=20))
    for wanted in (Wanted(context=4097), Wanted(options=("--max-model-len", "1M"))):
        with pytest.raises(InputError, match=r"expected 1 to 4096 tokens, the model's longest"):
            layout(model, "cpu", wanted)


def test_gpus_get_the_best_split_and_the_users_options_win(model):
    found = layout(model, "cpu", Wanted(gpus=4, gpu_memory=8))
    assert found.platform == "cuda"
    assert option_value(found.options, "--tensor-parallel-size") == "4"
    assert option_value(found.options, "--kv-cache-dtype") == "bfloat16"
    options = ("-tp", "2", "--pipeline_parallel_size=2", "--max-model-len", "1k")
    mine = layout(model, "cpu", Wanted(gpus=4, gpu_memory=8, options=options))
    assert mine.options == ["--kv-cache-dtype", "bfloat16"]
    assert "tp 2, pp 2" in mine.summary
    assert "requests up to 1,000" in mine.summary
    with pytest.raises(InputError, match="--max-model-len: is given on both sides of `--`"):
        layout(model, "cpu", Wanted(gpus=4, gpu_memory=8, context=9, options=options))
    share = ("--gpu-memory-utilization", "x")
    with pytest.raises(InputError, match="--gpu-memory-utilization: 'x' is no number"):
        layout(model, "cpu", Wanted(gpus=4, gpu_memory=8, options=share))


def test_a_refusal_says_which_split_would_do(model):
    with pytest.raises(NoFitError) as caught:
        layout(model, "cpu", Wanted(gpus=1, gpu_memory=2.2, tp=1, pp=1))
    said = str(caught.value)
    assert "does not fit on 1 GPU of 2.2 GiB: the best split (tp 1) needs" in said
    assert "GiB are missing; " in said
    smaller = layout(model, "cpu", Wanted(gpus=1, gpu_memory=8))
    assert "tp 1" in smaller.summary


def test_a_refusal_offers_a_shorter_context(model, monkeypatch):
    """Of two contexts the one that was asked for is too long."""
    from glm5lab.gguf.plan import make_plan

    fits = make_plan(model, 1, 2.6, context=2048).fits
    assert fits
    config = hf_config(model) | {"max_position_embeddings": 1 << 20}
    monkeypatch.setattr("glm5lab.gguf.plan.hf_config", lambda _model: config)
    with pytest.raises(NoFitError, match=r"--context \d+ would fit there, with bf16 rows"):
        layout(model, "cpu", Wanted(gpus=1, gpu_memory=2.6, context=1 << 20))


def test_tensor_ranks_stay_within_a_machine(model):
    two = layout(model, "cpu", Wanted(gpus=2, gpu_memory=8, nodes=2))
    assert "tp 2, pp 2" in two.summary


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *[("32k", 32_000), ("32K", 32_768), ("4096", 4096), ("1.5k", 1500), ("auto", None)],
        *[("-1", None), (None, None), ("x", None)],
    ],
)
def test_counts_as_vllm_takes_them(text, value):
    assert tokens(text) == value


def test_option_values():
    options = ["-tp", "2", "--max_model_len=7", "--dtype", "half", "--dtype", "auto"]
    assert option_value(options, "--tensor-parallel-size", "-tp") == "2"
    assert option_value(options, "--max-model-len") == "7"
    assert option_value(options, "--dtype") == "auto"
    assert option_value(options, "--seed") is None
    assert option_value(["--seed"], "--seed") == ""


def test_visible_gpus(monkeypatch):
    gpus = [Gpu(name, (9, 0), 1 << 17, "580", None) for name in "abc"]
    monkeypatch.setattr(planning, "find_gpus", lambda: gpus)
    for variable, seen in [("2,0", "ca"), ("", ""), ("GPU-1,GPU-2", "ab")]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", variable)
        assert [gpu.name for gpu in planning.visible_gpus()] == list(seen)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert planning.visible_gpus() == gpus


def test_a_key_is_demanded_where_others_reach_the_server():
    assert access("127.0.0.1", None, False).key is None
    assert access("localhost", None, False).lines == ()
    given = access("0.0.0.0", "secret", False)
    assert (given.key, given.generated) == ("secret", False)
    assert not any("secret" in line for line in given.lines)
    assert given.settings == {"VLLM_API_KEY": "secret"}
    one, two = access("0.0.0.0", None, False), access("0.0.0.0", "", False)
    assert one.key != two.key
    assert len(one.key or "") >= 32
    assert sum(str(one.key) in line for line in one.lines) == 1
    open_to_all = access("0.0.0.0", None, True)
    assert open_to_all.key is None
    assert "everybody" in open_to_all.lines[0]
    for key, no_auth, match in [("k", True, "leave one out"), ("a b", False, "blanks")]:
        with pytest.raises(InputError, match=match):
            access("127.0.0.1", key, no_auth)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *[("127.0.0.1", True), ("127.8.0.9", True), ("::1", True), ("localhost", True)],
        *[("0.0.0.0", False), ("::", False), ("192.0.2.1", False), ("no such host", False)],
    ],
)
def test_which_addresses_are_local(host, local):
    assert is_local(host) is local


def test_machines_get_vllms_own_options():
    nodes = Nodes(2, 0, "10.0.0.1")
    shared = ["--nnodes", "2", "--master-addr", "10.0.0.1", "--master-port", "29501"]
    assert set(shared) < set(nodes.options())
    assert option_value(nodes.options(), "--node-rank") == "0"
    assert "--headless" not in nodes.options()
    assert nodes.options(1)[-1] == "--headless"
    assert Nodes().options() == []
    assert Nodes(2, ray=True).options() == ["--distributed-executor-backend", "ray"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((2, 2, "a"), r"--node-rank: 2: expected 0 to 1 with --nodes 2"),
        ((2,), r"--head: is missing with --nodes 2"),
        ((1, 0, "a"), r"--head: is for several machines"),
        ((1, 0, None, 1, True), r"--ray: is for several machines"),
        ((2, 1, None, 1, True), r"--node-rank: 1: Ray starts the workers"),
    ],
)
def test_machines_that_contradict_each_other(arguments, match):
    with pytest.raises(InputError, match=match):
        Nodes(*arguments)


def glm5lab(*words):
    return subprocess.run([*GLM5LAB, *words], capture_output=True, text=True, timeout=120)


def test_a_dry_run_shows_a_command_that_a_shell_takes(sample_f32):
    answer = glm5lab("serve", str(sample_f32), "--host", "0.0.0.0", "--dry-run")
    assert answer.returncode == 0, answer.stderr
    plan, line, *_ = answer.stdout.splitlines()
    assert plan.startswith(f"plan: {sample_f32.name} on this CPU: weights in float32 0.08 + ")
    assert "VLLM_API_KEY" in line
    assert "key, generated" not in answer.stdout
    words = shlex.split(line)
    assert words[words.index("serve") + 1] == str(sample_f32)
    unset = subprocess.run(["sh", "-c", f"unset VLLM_API_KEY; {line}"], capture_output=True)
    assert unset.returncode != 0
    assert b"VLLM_API_KEY" in unset.stderr


def test_a_dry_run_shows_every_machine_s_command(sample_f32):
    words = ("--nodes", "2", "--head", "10.0.0.1", "--gpus", "2", "--gpu-memory", "8")
    answer = glm5lab("serve", str(sample_f32), *words, "--dry-run")
    assert answer.returncode == 0, answer.stderr
    first, second = answer.stdout.splitlines()[1:]
    assert second == first.replace("--node-rank 0", "--node-rank 1") + " --headless"
    assert "--dtype" not in first


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["/no/file"], 2, "glm5lab: /no/file: no such file or folder; "),
        (["FILE", "--prot", "1"], 2, "glm5lab serve: No such option: --prot "),
        (
            ["FILE", "--swap-space", "1"],
            2,
            "vLLM's own options stand behind `--`; see `glm5lab serve --help`",
        ),
        (["FILE", "--port", "x"], 2, "glm5lab serve: Invalid value for '--port': "),
        (["FILE", "--", "--port", "1"], 2, "glm5lab: --port: is among vLLM's own options; "),
        (["FILE", "--", "--api-key=k"], 2, "glm5lab: --api-key: is among vLLM's own options; "),
        (["FILE", "--", "--ssl-keyfile", "k"], 2, "glm5lab: --ssl-keyfile: is not supported"),
        (["FILE", "--gpu-memory", "0.5"], 1, "does not fit in memory: "),
        (["FILE", "--gpus", "4", "--gpu-memory", "8"], 2, "glm5lab: --gpus: no GPU is here"),
        (["FILE", "--gpus", "4", "--dry-run"], 2, "glm5lab: --gpus: no GPU is here to be asked"),
        (["FILE", "--no-auth", "--api-key", "k"], 2, "glm5lab: --no-auth: is given with an API"),
        (["FILE", "--log", "/dev/null/log"], 2, "glm5lab: /dev/null/log: cannot be written: "),
        (["https://example.org/x.gguf"], 2, "glm5lab: https://example.org/x.gguf: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_line_and_a_code(sample_f32, words, code, says):
    words = [str(sample_f32) if word == "FILE" else word for word in words]
    answer = glm5lab("serve", *words)
    assert answer.returncode == code, answer.stderr
    lines = [line for line in answer.stderr.splitlines() if not line.startswith("vLLM's output:")]
    assert len(lines) == 1, lines
    assert says in lines[0]


def test_a_full_disk_for_logs_is_named_before_anything_starts(monkeypatch):
    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(InputError, match="takes no log: No space left on device; give --log"):
        serve.log_folder()
