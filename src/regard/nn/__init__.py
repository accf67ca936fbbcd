"""Modules: parameters and state; the computation is in `regard.attention` and `regard.observe`."""

from .kv_cache import KVCache
from .multihead import MultiheadAttention
from .scaled_dot_product import ScaledDotProductAttention

__all__ = ["KVCache", "MultiheadAttention", "ScaledDotProductAttention"]
