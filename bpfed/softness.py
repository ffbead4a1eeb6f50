"""Softness: how much less sure all predictions are than the model was trained to be, and how far that may go.

Of classes it is a temperature, p^(1/softness) / Z; of numbers a factor by which their distribution is wider around its
mean. Either way 1 changes nothing.
"""

from __future__ import annotations

#: The lowest softness and the highest; no predictions are surer or softer for it than at these.
SUREST, SOFTEST = 0.01, 100.0
