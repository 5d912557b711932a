"""What a decoder is, as data: the shape of its layers and of the tensors that it needs. No tensors here.

A family is one value of `DecoderSpec`, not a file of its own: `headrace.engine.models.families` fills it
from a config.json, and one decoder computes whatever it says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.engine.errors import ModelLoadError
from headrace.engine.models.rope import RopeSpec

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm"
HEAD = "lm_head.weight"


class NormKind(StrEnum):
    """How a vector is normalised."""

    RMS = "rms"
    """By its root mean square (arXiv 1910.07467)."""
    LAYER = "layer"
    """By its mean and variance (arXiv 1607.06450)."""


class HeadNorm(StrEnum):
    """How queries and keys are normalised before they are turned (arXiv 2010.04245)."""

    NONE = "none"
    PER_HEAD = "per head"
    """Each head by itself, all query heads with one gain, all key heads with another."""
    OWN_GAIN = "own gain"
    """Each head by itself, with a gain of its own."""
    WHOLE = "whole"
    """All query heads together as one vector, and all key heads."""


class Activation(StrEnum):
    """What is applied to the gate of an MLP."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of the residual stream, and how they are stored.

    Args:
        eps: added to the mean square or the variance.
        offset: the gain is the stored weight and this; 1 for families that store the gain's distance from 1.
        has_bias: whether a bias is added.
    """

    eps: float
    kind: NormKind = NormKind.RMS
    offset: float = 0.0
    has_bias: bool = False


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of experts in the place of one MLP (arXiv 1701.06538).

    Args:
        count: experts of a layer.
        num_selected: experts that each token goes through: those with the greatest router probabilities.
        intermediate_size: inner width of each.
        is_normalised: the selected experts' probabilities are divided by their sum.
    """

    count: int
    num_selected: int
    intermediate_size: int
    is_normalised: bool

    def __post_init__(self) -> None:
        if self.num_selected > self.count:
            raise ModelLoadError(f"a token can't go through {self.num_selected} of {self.count} experts")


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """In what a layer may differ from its neighbours.

    Args:
        rope: how positions turn queries and keys; None leaves them: the layer knows the order of tokens only
            through the causal mask.
        window: a token sees itself and the `window - 1` before it; None sees all.
        experts: in the place of the MLP; None is one MLP for all tokens.
    """

    rope: RopeSpec | None
    window: int | None = None
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerNames:
    """What checkpoints call the parts of a layer; a norm that is None is not there.

    Args:
        before_attention, before_mlp: norms of what goes into either half.
        after_attention, after_mlp: norms of what comes out, before it joins the residual stream.
        qkv, gate_up: projections of one input, in this order; one name where the file keeps them as one.
        expert_gate_up, expert_down: with ``{}`` for the expert's number.
    """

    before_attention: str | None = "input_layernorm"
    after_attention: str | None = None
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    attention_out: str = "self_attn.o_proj"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    expert_gate_up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    expert_down: str = "mlp.experts.{}.down_proj"

    @property
    def norms(self) -> tuple[str, ...]:
        """Those that are there."""
        norms = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(norm for norm in norms if norm is not None)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """One decoder-only transformer: attention and a gated MLP per layer, each added to the residual stream.

    Args:
        family: architecture family, such as "llama".
        vocab_size: rows of the embedding and of the head.
        hidden_size, intermediate_size: width of the residual stream and of the MLP.
        num_heads, num_kv_heads: query heads, and the key/value heads that groups of them share.
        head_dim: width of one head; the heads together need not be as wide as the residual stream.
        max_position_embeddings: context length that the model declares, tokens.
        norm: of the residual stream.
        layers: one for each.
        names: where norms stand, and what tensors are called.
        head_norm: of queries and keys.
        activation: of the MLP's gate.
        qkv_bias, attention_out_bias, mlp_bias: whether these projections add a bias.
        attention_scale: factor on query . key; None is ``head_dim ** -0.5``.
        attention_soft_cap, logits_soft_cap: values become ``cap * tanh(value / cap)``; None leaves them.
        embedding_scale: factor on what the embedding gives.
        residual_scale: factor on what either half adds to the residual stream.
        logits_divisor: the logits are divided by it.
        is_parallel: attention and MLP read the same normalised input, and both are added at once.
        tied_head: the head is the embedding.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm: NormSpec
    layers: tuple[LayerSpec, ...]
    names: LayerNames = LayerNames()
    head_norm: HeadNorm = HeadNorm.NONE
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    attention_scale: float | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0
    is_parallel: bool = False
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
        for rope in self.ropes:
            rope.check_fits(self.head_dim)

    @property
    def num_layers(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The different ways in which layers turn queries and keys, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def max_len(self) -> int:
        """The greatest context that can be served, tokens: as declared, or as the rope scalings allow."""
        return min(
            (rope.longest_positions(self.max_position_embeddings) for rope in self.ropes),
            default=self.max_position_embeddings,
        )

    @property
    def default_len(self) -> int:
        """The context to serve where nobody says: the greatest in which all sequences are turned alike."""
        return min(
            (rope.longest_unstretched(self.max_position_embeddings) for rope in self.ropes),
            default=self.max_position_embeddings,
        )

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
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        shapes.update(self._norm_tensors(FINAL_NORM))
        if not self.tied_head:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        for index, layer in enumerate(self.layers):
            prefix = layer_prefix(index)
            for norm in self.names.norms:
                shapes.update(self._norm_tensors(prefix + norm))
            for name, shape in self._attention_tensors():
                shapes[prefix + name] = shape
            for name, shape in self._mlp_tensors(layer):
                shapes[prefix + name] = shape
        return shapes

    def head_gain_names(self, norm: str, num_heads: int) -> tuple[str, ...]:
        """The tensors that hold the gain of queries or keys, without the layer's prefix.

        Args:
            norm: one of `names`.
            num_heads: query heads or key heads.
        """
        match self.head_norm:
            case HeadNorm.NONE:
                return ()
            case HeadNorm.OWN_GAIN:
                return tuple(f"{norm}.norms.{head}.weight" for head in range(num_heads))
            case _:
                return (f"{norm}.weight",)

    def _norm_tensors(self, name: str) -> dict[str, tuple[int, ...]]:
        suffixes = ("weight", "bias") if self.norm.has_bias else ("weight",)
        return {f"{name}.{suffix}": (self.hidden_size,) for suffix in suffixes}

    def _attention_tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        names = self.names
        widths = (self.query_size, self.kv_size, self.kv_size)
        yield from _projections(names.qkv, widths, self.hidden_size, self.qkv_bias)
        yield from _projections(
            (names.attention_out,), (self.hidden_size,), self.query_size, self.attention_out_bias
        )
        for norm, num_heads in ((names.query_norm, self.num_heads), (names.key_norm, self.num_kv_heads)):
            width = num_heads * self.head_dim if self.head_norm is HeadNorm.WHOLE else self.head_dim
            for name in self.head_gain_names(norm, num_heads):
                yield name, (width,)

    def _mlp_tensors(self, layer: LayerSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
        names, hidden, experts = self.names, self.hidden_size, layer.experts
        if experts is None:
            inner = self.intermediate_size
            yield from _projections(names.gate_up, (inner, inner), hidden, self.mlp_bias)
            yield from _projections((names.down,), (hidden,), inner, self.mlp_bias)
            return
        inner = experts.intermediate_size
        yield f"{names.router}.weight", (experts.count, hidden)
        for expert in range(experts.count):
            gate_up = [name.format(expert) for name in names.expert_gate_up]
            yield from _projections(gate_up, (inner, inner), hidden, has_bias=False)
            yield from _projections((names.expert_down.format(expert),), (hidden,), inner, has_bias=False)


def layer_prefix(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}."


def _projections(
    names: Sequence[str], widths: Sequence[int], num_inputs: int, has_bias: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of projections of one input: one for each width, or a single one for all of them."""
    for name, rows in zip(names, widths if len(names) > 1 else (sum(widths),), strict=True):
        yield f"{name}.weight", (rows, num_inputs)
        if has_bias:
            yield f"{name}.bias", (rows,)
