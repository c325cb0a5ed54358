"""Small modules that all other modules use: text, files, encodings, pytrees, timing and argument checks."""
