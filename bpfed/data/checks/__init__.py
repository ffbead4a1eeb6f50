"""What whoever trains on tables should know of them, in sentences."""
