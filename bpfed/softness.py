"""Softness: the temperature of all class probabilities, and how far it may go."""

from __future__ import annotations

#: The lowest softness and the highest; no probabilities are surer or softer for it than at these.
SUREST, SOFTEST = 0.01, 100.0
