"""What is computed for a window: definitions, how they resolve, the ones beyond count and sum."""
