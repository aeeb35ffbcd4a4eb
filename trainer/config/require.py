"""What a configuration must fulfil: one sentence for each rule. Left out: the rules (trainer/config/__init__.py)."""

from proxy.pool.errors import UserError


def demand(holds: bool, sentence: str) -> None:
    """UserError with the sentence (the value, the rule, the way out) unless the rule holds."""
    if not holds:
        raise UserError(sentence)
