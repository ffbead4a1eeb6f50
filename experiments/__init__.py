"""The paper's experiments: protocols as data, one command for each table and figure, results as small JSON files."""
