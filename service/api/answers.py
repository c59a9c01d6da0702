"""The base of what the API answers and takes: pydantic models whose docstrings are its documentation."""

import math
from typing import Any

from pydantic import BaseModel, ConfigDict


class Described(BaseModel):
    """Base of answers: fields are described by their docstrings."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class Asked(BaseModel):
    """Base of what is asked: likewise, and a key that is not known is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


def finite(value: Any) -> Any:
    """`value` for JSON: numbers that are none become null."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(key): finite(each) for key, each in value.items()}
        case list() | tuple():
            return [finite(each) for each in value]
        case _:
            return value
