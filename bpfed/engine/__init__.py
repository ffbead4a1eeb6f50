"""Who runs, in what batches, on what device: plans, steps, local rounds, federations, stores and checkpoints."""
