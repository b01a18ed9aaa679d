"""Checks of user options"""
import math
from typing import Any

__all__ = ['check_number']


def check_number(
        value: Any,
        name: str,
        minimum: float = -math.inf,
        above: float = -math.inf,
        maximum: float = math.inf,
        integer: bool = False,
) -> Any:
    """Return a finite number in range; raise a ValueError for any other value.

    Args:
        value: Value of the option.
        name: Name of the option, used in error messages.
        minimum: Inclusive lower bound.
        above: Exclusive lower bound.
        maximum: Inclusive upper bound.
        integer: Whether only integers are allowed.
    """
    kinds = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value) \
            or not (minimum <= value <= maximum and value > above):
        limits = [f'{sign} {limit}' for sign, limit in (('>=', minimum), ('>', above), ('<=', maximum))
                  if math.isfinite(limit)]
        allowed = f'{"a whole number" if integer else "a number"} {" and ".join(limits)}'.rstrip()
        # PyYAML reads 5e-2 as a string.
        hint = ' (in YAML, write 0.05 or 5.0e-2, not 5e-2)' if isinstance(value, str) else ''
        raise ValueError(f'{name} must be {allowed}, got {value!r}{hint}.')
    return value
