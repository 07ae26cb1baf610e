"""The local page: a small server on this machine alone, and the files that a browser gets from it."""
