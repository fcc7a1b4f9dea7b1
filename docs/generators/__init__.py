"""What writes the generated pages; ``docs/generate.py`` calls it."""
