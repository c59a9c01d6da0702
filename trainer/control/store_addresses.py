"""Addresses in a spec: folders and object stores. Loads nothing but the parser."""

from millrace.blob.store_address import StoreAddress, StoreKind
from millrace.blob.store_address import parse as parse_store_address

__all__ = ["StoreAddress", "StoreKind", "parse_store_address"]
