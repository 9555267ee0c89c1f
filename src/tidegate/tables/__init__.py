"""Tables that applications share: serdes, windowed and sessioned tables, versions, queries."""
