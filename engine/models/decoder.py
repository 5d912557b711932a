"""The decoder over one flat token axis: only attention sees sequence borders (Orca, OSDI '22).

Letters: T tokens of the step, R rows whose logits are wanted, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.engine.attention.backend import AttentionStep
from headrace.engine.kv.storage import KVShape
from headrace.engine.models.decoder_layer import DecoderLayer, WeightSource, make_norm
from headrace.engine.models.layers import make_linear, soft_capped
from headrace.engine.models.reduced_head import ReducedHead
from headrace.engine.models.rope import RotaryTable
from headrace.engine.models.spec import EMBEDDING, FINAL_NORM, HEAD, DecoderSpec
from headrace.engine.native.kit import native_kit
from headrace.engine.native.quantised import WeightKind
from headrace.engine.native.stack import HeadShape, NativeStack


class Decoder:
    """A decoder-only transformer that is ready to compute; weights are never changed."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightSource,
        *,
        max_len: int,
        weight_kind: WeightKind = WeightKind.SAME,
        reduced_head: ReducedHead | None = None,
    ) -> None:
        """Take every tensor of `spec.tensors()` from `weights` and lay it out for its device.

        Args:
            max_len: longest sequence, tokens; positions stay below it.
            weight_kind: how the weights of linear layers are kept. Embedding and norms stay as they are.
            reduced_head: gives logits of some tokens alone, in the place of the model's own head.
        """
        self._spec = spec
        self._embedding = weights.read(EMBEDDING)
        self._layers = [DecoderLayer(spec, weights, layer, weight_kind) for layer in range(spec.num_layers)]
        self._stack = _native_stack(spec, self._layers)
        self._final_norm = make_norm(spec.norm, weights, FINAL_NORM)
        # A packed head keeps its own copy: the lookup below needs the embedding row by row.
        # What the head gets wrong no later layer can mend: it has eight bits at least.
        head_kind = WeightKind.INT8 if weight_kind is WeightKind.INT4 else weight_kind
        if reduced_head is not None:
            head = reduced_head.weight.to(device=self.device, dtype=self.dtype)
        else:
            head = self._embedding if spec.tied_head else weights.read(HEAD)
        self._num_logits = head.shape[0]
        self._head = make_linear(head, kind=head_kind)
        # The reference rounds the factor to the model's type, and so the model was trained.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=self.dtype).item()
        self._rotary = [
            RotaryTable(rope, spec.head_dim, max_len, dtype=self.dtype, device=self.device)
            for rope in spec.ropes
        ]

    @property
    def spec(self) -> DecoderSpec:
        """What this decoder is."""
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        """Type of activations, and of K and V."""
        return self._embedding.dtype

    @property
    def kv_shape(self) -> KVShape:
        """What its keys and values take per token, kept as it computes them."""
        spec = self.spec
        return KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, self.dtype)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, logits_rows: Tensor
    ) -> Tensor:
        """Compute one step: writes the K and V of all its tokens, gives logits for some.

        Args:
            input_ids: (T,), int64.
            positions: (T,), int64: each token's place in its own sequence.
            attention: this step's attention over the paged cache.
            logits_rows: (R,), int64: indices into the token axis.

        Returns:
            (R, V), fp32.
        """
        return self.logits(self.hidden(input_ids, positions, attention, logits_rows))

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, positions: Tensor, attention: AttentionStep, rows: Tensor) -> Tensor:
        """Compute one step as far as the head: whoever wants many rows' logits takes them in slices.

        Args:
            input_ids, positions, attention: see `forward`.
            rows: (R,), int64: indices into the token axis.

        Returns:
            (R, hidden size): what `logits` takes.
        """
        hidden = F.embedding(input_ids, self._embedding)
        if self._embedding_scale != 1.0:
            hidden = hidden.mul_(self._embedding_scale)
        rotary = [table.rows(positions) for table in self._rotary]
        if self._stack is not None and self._stack.takes(attention):
            return self._final_norm(self._stack.run(hidden, rotary, attention, rows))
        for layer in self._layers[:-1]:
            hidden = layer.finish(hidden, layer.attend(hidden, rotary, attention))
        last = self._layers[-1]
        attended = last.attend(hidden, rotary, attention)
        # Past the last attention no token needs another: go on with the wanted rows alone.
        if rows.shape[0] == 0:
            return hidden[:0]
        hidden = last.finish(hidden.index_select(0, rows), attended.index_select(0, rows))
        return self._final_norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Go from `hidden`'s rows, all or some, to logits.

        Args:
            hidden: (R, hidden size).

        Returns:
            (R, V), fp32; (R, rows of the reduced head) where it has one.
        """
        if hidden.shape[0] == 0:
            return torch.empty((0, self._num_logits), dtype=torch.float32, device=self.device)
        logits = self._head.wide(hidden)
        if self._spec.logits_divisor != 1.0:
            logits = logits.div_(self._spec.logits_divisor)
        cap = self._spec.logits_soft_cap
        return logits if cap is None else soft_capped(logits, cap)


def _native_stack(spec: DecoderSpec, layers: Sequence[DecoderLayer]) -> NativeStack | None:
    """The layers as one call into the compiled kernels; None unless all of them can be in it."""
    kit = native_kit()
    plain = [layer for layer in map(DecoderLayer.plain, layers) if layer is not None]
    if kit is None or not plain or len(plain) < len(layers):
        return None
    return NativeStack(kit.library, plain, HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim))
