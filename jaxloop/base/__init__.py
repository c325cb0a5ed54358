"""Utility modules for text, files, encodings, pytrees, timing and argument checks."""
