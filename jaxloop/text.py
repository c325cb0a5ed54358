"""Text that is safe to display in a terminal or log."""


def printable(text: object) -> str:
    r"""Returns text as a single line, with all unprintable characters escaped.

    Metric names and text read from files may contain newlines, carriage returns or escape sequences. Use this function
    wherever such text is displayed. When writing to files, keep the original text.

    >>> print(printable("loss\n\x1b[31m"))
    loss\n\x1b[31m
    """
    line = str(text)
    if line.isprintable():
        return line
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in line)
