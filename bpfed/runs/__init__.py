"""Runs: training one, its folder, its clients, and what can be asked of it afterwards."""
