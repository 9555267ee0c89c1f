"""Tables other applications share: serdes, windowed and sessioned tables, queries."""
