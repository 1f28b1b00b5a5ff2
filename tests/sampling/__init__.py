"""Tests of parameters, stages, random numbers and the sampler."""
