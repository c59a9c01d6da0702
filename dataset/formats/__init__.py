"""Formats of events and answers: MultiSlot text, Arrow columns, and what generators write."""
