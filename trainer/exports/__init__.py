"""Exports: what serving needs, made from commits while training goes on."""
