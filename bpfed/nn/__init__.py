"""Networks as functions of one flat weight vector, for many clients at once."""
