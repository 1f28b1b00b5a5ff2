"""Caches shared by all sequences."""
