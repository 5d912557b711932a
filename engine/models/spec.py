"""What a decoder is, as data: the shape of its layers and of the tensors that it needs. No tensors here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.rope import RopeSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer with RMSNorm before each half-layer, rotary positions and a gated MLP.

    Args:
        family: architecture family, such as "llama".
        vocab_size: rows of the embedding and of the head.
        hidden_size, intermediate_size: width of the residual stream and of the MLP.
        num_heads, num_kv_heads: query heads, and the key/value heads that groups of them share.
        head_dim: width of one head; the heads together need not be as wide as the residual stream.
        norm_eps: added to the mean square inside RMSNorm.
        max_position_embeddings: context length that the model declares, tokens.
        attention_bias, mlp_bias: whether the projections of each half add a bias.
        tied_head: the head is the embedding.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: RopeSpec
    attention_bias: bool = False
    mlp_bias: bool = False
    tied_head: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"{self.num_heads} query heads can't share {self.num_kv_heads} key/value heads evenly"
            )
        if self.head_dim % 2:
            raise ModelLoadError(
                f"head_dim {self.head_dim} is odd: rotary positions turn pairs of coordinates"
            )

    @property
    def max_len(self) -> int:
        """The greatest context that can be served, tokens: as declared, or as the rope scaling allows."""
        return self.rope.longest_positions(self.max_position_embeddings)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; the value heads have the same."""
        return self.num_kv_heads * self.head_dim

    def tensors(self) -> Mapping[str, tuple[int, ...]]:
        """Name and shape of every tensor that a checkpoint must hold, as the reference library names them."""
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, self.hidden_size),
            FINAL_NORM: (self.hidden_size,),
        }
        if not self.tied_head:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        for layer in range(self.num_layers):
            shapes.update(self._layer_tensors(f"model.layers.{layer}"))
        return shapes

    def _layer_tensors(self, prefix: str) -> dict[str, tuple[int, ...]]:
        hidden, inner = self.hidden_size, self.intermediate_size
        projections = {
            "self_attn.q_proj": (self.query_size, hidden, self.attention_bias),
            "self_attn.k_proj": (self.kv_size, hidden, self.attention_bias),
            "self_attn.v_proj": (self.kv_size, hidden, self.attention_bias),
            "self_attn.o_proj": (hidden, self.query_size, self.attention_bias),
            "mlp.gate_proj": (inner, hidden, self.mlp_bias),
            "mlp.up_proj": (inner, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, inner, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}.input_layernorm.weight": (hidden,),
            f"{prefix}.post_attention_layernorm.weight": (hidden,),
        }
        for name, (rows, columns, has_bias) in projections.items():
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        return shapes
