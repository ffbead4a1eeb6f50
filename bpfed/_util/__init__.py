"""Tools that know nothing of learning: errors, files, processes, the console, and text."""
