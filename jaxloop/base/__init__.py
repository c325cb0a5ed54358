"""Small modules that all others use: text, files, encodings, pytrees, times and checks of arguments."""
