"""Distributions over weights: random streams, Gaussians, likelihoods, gradients, optimisers and predictions."""
