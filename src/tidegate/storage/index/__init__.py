"""The bucket index: which runs a store has, where each lies, and under which version."""
