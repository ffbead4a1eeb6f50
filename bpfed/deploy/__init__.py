"""A federation of real sites on Flower: the same local rounds, the same server's rule, nothing personal on the wire."""
