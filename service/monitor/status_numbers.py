"""The numbers of a status in the models of the API. The command line reads a status without them."""

from typing import Annotated

from pydantic import WithJsonSchema

Number = Annotated[int | float, WithJsonSchema({"type": "number"})]
"""Stays the whole number or the float that it is; to a JSON Schema each is a number, and generators of clients make one
type of it."""
