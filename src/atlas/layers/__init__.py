"""Layers: weights in their order of use, and the ops that run them. They know no backend."""
