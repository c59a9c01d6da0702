"""Addresses in a spec: folders and object stores. Loads nothing but the parser."""

from headrace.blob.store_address import StoreAddress, StoreKind
from headrace.blob.store_address import parse as parse_store_address

__all__ = ["StoreAddress", "StoreKind", "parse_store_address"]
