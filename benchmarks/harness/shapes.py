"""The KV-cache shapes of public models, from which block sizes follow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Tokens in one stored block: what LMCache uses by default, 16 times vLLM's GPU block.
TOKENS_PER_BLOCK: Final = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a model keeps of every token.

    Attributes:
        name: of the model.
        layers: ``num_hidden_layers``.
        kv_heads: ``num_key_value_heads``.
        head_dim: ``head_dim``, or ``hidden_size / num_attention_heads`` where that is absent.
        dtype: ``torch_dtype`` of the cache.
        dtype_nbytes: bytes of one number.
        sliding_layers: of *layers*, those that attend to the last *sliding_window* tokens only.
        sliding_window: tokens, or None.
        source: where the numbers come from.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    dtype_nbytes: int = 2
    sliding_layers: int = 0
    sliding_window: int | None = None
    source: str

    def __str__(self) -> str:
        return self.name

    def piece_nbytes(self, tokens: int = TOKENS_PER_BLOCK) -> int:
        """Count the bytes of one piece: K or V of one layer."""
        return self.kv_heads * self.head_dim * self.dtype_nbytes * tokens

    def pieces(self) -> int:
        """Count the pieces of one block: K and V of every layer."""
        return 2 * self.layers

    def block_nbytes(self, tokens: int = TOKENS_PER_BLOCK) -> int:
        """Count the bytes of one block: 2 x layers x kv_heads x head_dim x dtype x tokens.

        Sliding-window layers are counted like all others. A block may be the last of a prefix
        that is reused later, and then the window lies in it; a store that is to serve any prefix
        keeps every layer of every block.
        """
        return self.pieces() * self.piece_nbytes(tokens)

    def full_attention_nbytes(self, tokens: int = TOKENS_PER_BLOCK) -> int:
        """Count the bytes without sliding-window layers: what a reused inner block needs."""
        return 2 * (self.layers - self.sliding_layers) * self.piece_nbytes(tokens)


_SHAPES: Final = (
    ModelShape(
        name="Llama-3.1-8B",
        layers=32,
        kv_heads=8,
        head_dim=128,  # 4096 / 32
        source="meta-llama/Llama-3.1-8B config.json",
    ),
    ModelShape(
        name="Llama-3.1-70B",
        layers=80,
        kv_heads=8,
        head_dim=128,  # 8192 / 64
        source="meta-llama/Llama-3.1-70B config.json",
    ),
    ModelShape(
        name="Qwen3-8B",
        layers=36,
        kv_heads=8,
        head_dim=128,
        source="Qwen/Qwen3-8B config.json",
    ),
    ModelShape(
        name="Qwen3-32B",
        layers=64,
        kv_heads=8,
        head_dim=128,
        source="Qwen/Qwen3-32B config.json",
    ),
    ModelShape(
        name="gpt-oss-120b",
        layers=36,
        kv_heads=8,
        head_dim=64,
        sliding_layers=18,  # layer_types alternates, sliding_attention first
        sliding_window=128,
        source="openai/gpt-oss-120b config.json",
    ),
)

#: Every shape by the model's name.
SHAPES: Final = {shape.name: shape for shape in _SHAPES}
