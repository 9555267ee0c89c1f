"""The page and the HTTP API: what happens in a log, its apps and its tables, to look at and to ask for. Reads only."""
