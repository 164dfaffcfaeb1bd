"""What does not fit between a file and GLM-5: unknown names, missing tensors, wrong shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm5lab.errors import InputError
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.names import NameMapping, has_indexer, map_names

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Reconciliation:
    """The name table of a file and everything that is wrong with it.

    Attributes:
        mappings: one a tensor that GLM-5 has, in file order.
        problems: a sentence each, naming the tensor, what was expected and what was found.
    """

    mappings: list[NameMapping]
    problems: list[str]

    @property
    def loaded(self) -> list[NameMapping]:
        """The mappings that fill a parameter."""
        return [m for m in self.mappings if not m.dropped]

    @property
    def dropped(self) -> list[NameMapping]:
        """The mappings that are left out, each with its reason."""
        return [m for m in self.mappings if m.dropped]


def outside_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes (torch order) of the tensors outside the blocks."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, Shape] = {
        "token_embd.weight": (vocabulary, hidden),
        "output_norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["output.weight"] = (vocabulary, hidden)
    return shapes


def attention_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of a block's attention tensors."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_lora, kv_lora = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    v = config["v_head_dim"]
    return {
        "attn_norm.weight": (hidden,),
        "ffn_norm.weight": (hidden,),
        "attn_q_a.weight": (q_lora, hidden),
        "attn_q_a_norm.weight": (q_lora,),
        "attn_q_b.weight": (heads * (nope + rope), q_lora),
        "attn_kv_a_mqa.weight": (kv_lora + rope, hidden),
        "attn_kv_a_norm.weight": (kv_lora,),
        "attn_k_b.weight": (heads, kv_lora, nope),
        "attn_v_b.weight": (heads, v, kv_lora),
        "attn_output.weight": (hidden, heads * v),
    }


def indexer_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Shapes of the lightning indexer's tensors."""
    hidden, q_lora = config["hidden_size"], config["q_lora_rank"]
    heads, width = config["index_n_heads"], config["index_head_dim"]
    return {
        "indexer.attn_q_b.weight": (heads * width, q_lora),
        "indexer.attn_k.weight": (width, hidden),
        "indexer.proj.weight": (heads, hidden),
        "indexer.k_norm.weight": (width,),
        "indexer.k_norm.bias": (width,),
    }


def feed_forward_shapes(config: Mapping[str, Any], layer: int) -> dict[str, Shape]:
    """Shapes of a block's feed-forward tensors, dense or experts."""
    hidden = config["hidden_size"]
    if layer < config["first_k_dense_replace"]:
        return gate_up_down("", config["intermediate_size"], hidden)
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    shapes: dict[str, Shape] = {
        "ffn_gate_inp.weight": (experts, hidden),
        "exp_probs_b.bias": (experts,),
    }
    shapes |= gate_up_down("_exps", width, hidden, experts)
    if config["n_shared_experts"]:
        shapes |= gate_up_down("_shexp", width * config["n_shared_experts"], hidden)
    return shapes


def gate_up_down(suffix: str, width: int, hidden: int, *stack: int) -> dict[str, Shape]:
    """Shapes of a gated feed-forward's three matrices."""
    return {
        f"ffn_gate{suffix}.weight": (*stack, width, hidden),
        f"ffn_up{suffix}.weight": (*stack, width, hidden),
        f"ffn_down{suffix}.weight": (*stack, hidden, width),
    }


def expected_shapes(config: Mapping[str, Any]) -> dict[str, Shape]:
    """Every GGUF tensor that GLM-5 needs, with its shape, the MTP block left out."""
    expected = outside_shapes(config)
    for layer in range(config["num_hidden_layers"]):
        block = attention_shapes(config) | feed_forward_shapes(config, layer)
        if has_indexer(layer, config):
            block |= indexer_shapes(config)
        expected |= {f"blk.{layer}.{role}": shape for role, shape in block.items()}
    return expected


def reconcile(model: GgufModel, config: Mapping[str, Any]) -> Reconciliation:
    """Map every tensor and list what does not fit; never raises for the file's contents."""
    mappings, unknown = map_names(model.tensors, config)
    problems = [f"{name}: GLM-5 has no such tensor" for name in unknown]
    for name, shape in expected_shapes(config).items():
        tensor = model.tensors.get(name)
        if tensor is None:
            problems.append(f"{name}: missing, expected shape {list(shape)}")
        elif tensor.shape != shape:
            problems.append(f"{name}: expected shape {list(shape)}, found {list(tensor.shape)}")
        elif tensor.type.startswith("unknown"):
            problems.append(f"{name}: type {tensor.type} cannot be dequantized here")
    return Reconciliation(mappings, problems)


def require_complete(model: GgufModel, config: Mapping[str, Any]) -> Reconciliation:
    """`reconcile`, raising InputError that lists the problems (the first ten of them)."""
    result = reconcile(model, config)
    if result.problems:
        shown = "; ".join(result.problems[:10])
        more = len(result.problems) - 10
        raise InputError(
            model.path,
            f"does not hold a complete GLM-5: {shown}" + (f"; and {more} more" if more > 0 else ""),
            "`glm5lab map` lists everything; use a complete file of architecture glm-dsa",
        )
    return result
