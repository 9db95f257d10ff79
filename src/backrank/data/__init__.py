"""Text and tokens: what is trained on, in which order, and its identity. Neither torch nor the network is needed."""

from backrank.data.tokens import Tokens, Windows, check, content_hash, eval_windows, load

__all__ = ["Tokens", "Windows", "check", "content_hash", "eval_windows", "load"]
