"""Windows over keyed events: kinds, operators, aggregates, window and session stores, deduplication."""
