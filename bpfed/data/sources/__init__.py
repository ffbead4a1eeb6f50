"""Datasets before they are distributed over clients, and where their files come from."""
