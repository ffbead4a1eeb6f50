"""Speed, scale and memory, each against plain code written here, in the same run; printed as ratios, kept as JSON."""
