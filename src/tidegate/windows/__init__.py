"""Windows over keyed events: kinds, time segments, window and session stores, deduplication."""
