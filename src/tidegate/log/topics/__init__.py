"""Topic names, their settings with sources, and the catalog of a log folder."""
