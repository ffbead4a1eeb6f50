"""Tables of clients: reading files, statistics, preprocessing, and the federation they form."""
