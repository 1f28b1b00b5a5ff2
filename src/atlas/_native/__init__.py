"""Cython and C: integers and pointers, never tensors."""
