"""Backends: the op vocabulary of ``atlas.ops`` on a kind of device."""
